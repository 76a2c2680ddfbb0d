// From rewards to advantages, in float64.
#ifndef ISOBIT_TRAINER_BRIDGE_TRAINER_ADVANTAGES_H_
#define ISOBIT_TRAINER_BRIDGE_TRAINER_ADVANTAGES_H_

#include <cstddef>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace isobit::trainer {

// Each reward minus the mean of its group. rewards: of whole groups, one after the other.
// by_deviation: also divides by the group's standard deviation (GRPO). If all rewards of a group
// are equal, its advantages are 0. INVALID_ARGUMENT: the last group is not whole, or a reward is
// not finite.
absl::StatusOr<std::vector<double>> Advantages(absl::Span<const double> rewards, size_t group_size,
                                               bool by_deviation);

}  // namespace isobit::trainer

#endif  // ISOBIT_TRAINER_BRIDGE_TRAINER_ADVANTAGES_H_
