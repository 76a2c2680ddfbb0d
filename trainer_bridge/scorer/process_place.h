// Finds out which process of a group this one is, from flags or from the environment variables of
// torchrun or of Kubernetes' LeaderWorkerSet.
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
  int local_rank = 0;       // among the processes of its host
  std::string master_addr;  // of rank 0; empty if there is only one process
  int master_port = 29500;
};

// The flags; unset if not given.
struct PlaceFlags {
  std::optional<int> rank{};
  std::optional<int> world_size{};
  std::string master_addr{};
  std::optional<int> master_port{};
};

// Flags take precedence over RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT (torchrun), and
// these over LWS_WORKER_INDEX, LWS_GROUP_SIZE, LWS_LEADER_ADDRESS (LeaderWorkerSet). If none gives
// the number of processes, it is 1. With one process the other variables are ignored, since they
// may be meant for the trainer that started it. If torchrun itself listens on MASTER_PORT, the next
// port is used. `environment` returns a variable's value, or null.
// INVALID_ARGUMENT, naming flag or variable: it is no number, out of range, or missing in a group.
absl::StatusOr<ProcessPlace> PlaceOfProcess(
    const PlaceFlags& flags, const std::function<const char*(const char*)>& environment);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_PROCESS_PLACE_H_
