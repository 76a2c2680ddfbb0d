// Samples a step's completions from the rollout, and checks that its current weights drew them.
#ifndef ISOBIT_TRAINER_BRIDGE_TRAINER_SAMPLER_H_
#define ISOBIT_TRAINER_BRIDGE_TRAINER_SAMPLER_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "isobit/v1/comparator.pb.h"
#include "trainer_bridge/trainer/completion.h"
#include "trainer_bridge/trainer/services.h"
#include "trainer_bridge/trainer/settings.h"
#include "trainer_bridge/trainer/task.h"

namespace isobit::trainer {

// One element per completion, ordered by the prompts' numbers, then by sample.
struct Batch {
  std::vector<Completion> completions;
  std::vector<v1::RecordSide> sides;  // the rollout's answer for each, for the comparator
};

// The completions of the prompts of step `step`, counted from 0. FAILED_PRECONDITION: other weights
// than services.serving() have drawn a token. CANCELLED: StopAsked. Errors of a call name its
// prompt.
absl::StatusOr<Batch> Sample(Services& services, const Task& task, const Recipe& recipe,
                             int64_t step);

}  // namespace isobit::trainer

#endif  // ISOBIT_TRAINER_BRIDGE_TRAINER_SAMPLER_H_
