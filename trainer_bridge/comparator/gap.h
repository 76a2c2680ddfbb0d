// The gap of one token: rollout's logprob minus scorer's, and other distances. Pure arithmetic.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_GAP_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_GAP_H_

#include <cstdint>
#include <limits>

namespace isobit {

// The distance if one side is a NaN. Two numbers are never that far apart.
inline constexpr uint32_t kNanUlpDistance = std::numeric_limits<uint32_t>::max();

// Logprobs are natural logarithms; probabilities are their exp. Both differences are float64.
struct Gap {
  float rollout;
  float scorer;
  bool equal;             // same bits, and not NaN
  bool has_nan;           // on either side
  bool impossible;        // on either side: see CanBeDrawn
  double abs_dp;          // |exp(rollout) - exp(scorer)|; 1 where dlogp is NaN
  double dlogp;           // rollout - scorer; NaN with a NaN, and for equal infinities
  uint32_t ulp_distance;  // 0 exactly if `equal`; kNanUlpDistance with a NaN
};

Gap ComputeGap(float rollout, float scorer);

// Whether a drawn token can have this logprob: greater than -infinity, at most 0.
bool CanBeDrawn(float logprob);

// The number of steps from `a` to `b` through neighbouring fp32 values; -0 and +0 are neighbours,
// since their bits differ. kNanUlpDistance if either is NaN.
uint32_t UlpDistance(float a, float b);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_GAP_H_
