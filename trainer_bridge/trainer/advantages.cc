// The advantages of one group after the other.
#include "trainer_bridge/trainer/advantages.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "trainer_bridge/trainer/mean.h"

namespace isobit::trainer {
namespace {

constexpr double kMaxReward = 0x1p127;  // the difference of two rewards is finite in fp32

}  // namespace

absl::StatusOr<std::vector<double>> Advantages(absl::Span<const double> rewards, size_t group_size,
                                               bool by_deviation) {
  if (group_size == 0 || rewards.size() % group_size != 0) {
    return absl::InvalidArgumentError(absl::StrCat("rewards: expected groups of ", group_size,
                                                   ", got ", rewards.size(), " rewards"));
  }
  for (size_t i = 0; i < rewards.size(); ++i) {
    if (std::abs(rewards[i]) < kMaxReward) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("rewards[", i, "] (group ", i / group_size, ", sample ", i % group_size,
                     "): expected a finite number below 2^127, got ", rewards[i]));
  }
  std::vector<double> advantages;
  for (size_t begin = 0; begin < rewards.size(); begin += group_size) {
    const auto group = rewards.subspan(begin, group_size);
    // The mean of equal rewards may be another number, by rounding.
    const bool is_equal = std::ranges::count(group, group.front()) == std::ssize(group);
    const double mean = Mean(group);
    const double divisor = by_deviation ? Deviation(group) : 1.0;
    for (const double reward : group) {
      advantages.push_back(is_equal || divisor == 0 ? 0.0 : (reward - mean) / divisor);
    }
  }
  return advantages;
}

}  // namespace isobit::trainer
