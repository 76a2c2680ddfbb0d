// The process isobit-rollout, behind its command line.
#ifndef ISOBIT_ROLLOUT_SERVICE_ROLLOUT_PROCESS_H_
#define ISOBIT_ROLLOUT_SERVICE_ROLLOUT_PROCESS_H_

#include "absl/status/statusor.h"
#include "rollout/service/rollout_settings.h"

namespace isobit {

inline constexpr char kRolloutUsage[] =
    "isobit-rollout --model_root=DIR --model=NAME [flags]\n"
    "Generates tokens with a Hugging Face model on tensor-parallel ranks, over gRPC\n"
    "(isobit.v1.RolloutService). Stops on SIGTERM once calls in flight have finished.";

// Serves until the process shall end, for ServiceMain (common/rpc/service_main.h).
absl::StatusOr<int> ServeRollout(const RolloutSettings& settings);

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SERVICE_ROLLOUT_PROCESS_H_
