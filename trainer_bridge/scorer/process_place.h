// Which process of a group this one is: by flags, or by what torchrun or Kubernetes'
// LeaderWorkerSet put into the environment.
#ifndef ISOBIT_TRAINER_BRIDGE_SCORER_PROCESS_PLACE_H_
#define ISOBIT_TRAINER_BRIDGE_SCORER_PROCESS_PLACE_H_

#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace isobit {

struct ProcessPlace {
  int rank = 0;             // of the process, in [0, world_size); 0 leads
  int world_size = 1;       // processes
  int local_rank = 0;       // among those of its host
  std::string master_addr;  // of rank 0; empty if there is one process
  int master_port = 29500;
};

// What was given on the command line.
struct PlaceFlags {
  std::optional<int> rank{};
  std::optional<int> world_size{};
  std::string master_addr{};
  std::optional<int> master_port{};
};

// A flag goes before RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT (torchrun), and these
// before LWS_WORKER_INDEX, LWS_GROUP_SIZE, LWS_LEADER_ADDRESS (LeaderWorkerSet). The number of
// processes decides: where nothing says it there is one, and if there is one, variables do not
// count, which may be those of the trainer that started it. Where torchrun listens on MASTER_PORT
// itself, the port is the one after it. `environment` gives a variable, or null.
// INVALID_ARGUMENT, naming flag or variable: not a number or out of range; a group without rank or
// address.
absl::StatusOr<ProcessPlace> PlaceOfProcess(
    const PlaceFlags& flags, const std::function<const char*(const char*)>& environment);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_PROCESS_PLACE_H_
