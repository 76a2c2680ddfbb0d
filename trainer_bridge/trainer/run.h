// An on-policy run, from the state of its folder to its last step: sample, differentiate, compare,
// step, send the weights, sample again.
#ifndef ISOBIT_TRAINER_BRIDGE_TRAINER_RUN_H_
#define ISOBIT_TRAINER_BRIDGE_TRAINER_RUN_H_

#include "absl/status/status.h"
#include "common/rpc/channel_security.h"
#include "trainer_bridge/trainer/settings.h"
#include "trainer_bridge/trainer/trainer_metrics.h"

namespace isobit::trainer {

// Reports progress on stdout. A stop signal drops the current step, saves the run, and is no error.
// After an error in a step, the run is saved as it was before the step. DATA_LOSS: sampler and
// trainer have different logprobs, and settings.on_gap is stop. metrics: records each step and
// comparison.
absl::Status Train(const Settings& settings, const ChannelSecurity& security,
                   TrainerMetrics& metrics);

}  // namespace isobit::trainer

#endif  // ISOBIT_TRAINER_BRIDGE_TRAINER_RUN_H_
