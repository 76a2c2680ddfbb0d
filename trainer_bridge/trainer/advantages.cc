// See advantages.h.
#include "trainer_bridge/trainer/advantages.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "trainer_bridge/trainer/exact_sum.h"

namespace isobit::trainer {

absl::StatusOr<std::vector<double>> Advantages(absl::Span<const double> rewards, size_t group_size,
                                               bool by_deviation) {
  if (group_size == 0 || rewards.size() % group_size != 0) {
    return absl::InvalidArgumentError(absl::StrCat("rewards: expected groups of ", group_size,
                                                   ", got ", rewards.size(), " rewards"));
  }
  for (const double reward : rewards) {
    if (std::isfinite(reward)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("rewards: expected finite numbers, got ", reward));
  }
  std::vector<double> advantages;
  for (size_t begin = 0; begin < rewards.size(); begin += group_size) {
    const auto group = rewards.subspan(begin, group_size);
    const double mean = Mean(group);
    const double divisor = by_deviation ? Deviation(group) : 1.0;
    for (const double reward : group) {
      advantages.push_back(divisor > 0 ? (reward - mean) / divisor : 0.0);
    }
  }
  return advantages;
}

}  // namespace isobit::trainer
