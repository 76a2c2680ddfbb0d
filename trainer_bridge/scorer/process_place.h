// Finds out which process of a group this one is, from flags or from the environment that torchrun
// or Kubernetes' LeaderWorkerSet has set.
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

// The flags that are given; unset: not given.
struct PlaceFlags {
  std::optional<int> rank{};
  std::optional<int> world_size{};
  std::string master_addr{};
  std::optional<int> master_port{};
};

// Flags take precedence over RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT (torchrun), and
// these over LWS_WORKER_INDEX, LWS_GROUP_SIZE, LWS_LEADER_ADDRESS (LeaderWorkerSet). Without any
// number of processes there is one. If there is one, the other variables are ignored, since they
// may be meant for the trainer that started it. If torchrun itself listens on MASTER_PORT, the next
// port is used. `environment` returns a variable's value, or null.
// INVALID_ARGUMENT names the flag or variable: not a number, out of range, or, in a group, missing.
absl::StatusOr<ProcessPlace> PlaceOfProcess(
    const PlaceFlags& flags, const std::function<const char*(const char*)>& environment);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_PROCESS_PLACE_H_
