// Computes gaps.
#include "trainer_bridge/comparator/gap.h"

#include <bit>
#include <cmath>

namespace isobit {
namespace {

// Maps fp32 bits to integers in the order of the values, with -0 just below +0.
uint32_t OrderedBits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  constexpr uint32_t kSign = 0x80000000u;
  return (bits & kSign) != 0 ? ~bits : bits | kSign;
}

}  // namespace

uint32_t UlpDistance(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return kNanUlpDistance;
  const uint32_t x = OrderedBits(a);
  const uint32_t y = OrderedBits(b);
  return x > y ? x - y : y - x;
}

bool CanBeDrawn(float logprob) { return std::isfinite(logprob) && logprob <= 0; }

Gap ComputeGap(float rollout, float scorer) {
  Gap gap{};
  gap.rollout = rollout;
  gap.scorer = scorer;
  gap.has_nan = std::isnan(rollout) || std::isnan(scorer);
  gap.ulp_distance = UlpDistance(rollout, scorer);
  gap.equal = gap.ulp_distance == 0;
  gap.impossible = !CanBeDrawn(rollout) || !CanBeDrawn(scorer);
  const double a = rollout;
  const double b = scorer;
  gap.dlogp = a - b;
  gap.abs_dp = std::isnan(gap.dlogp) ? 1.0 : std::fabs(std::exp(a) - std::exp(b));
  return gap;
}

}  // namespace isobit
