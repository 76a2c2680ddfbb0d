// The gap of one token: how far the rollout's logprob is from the scorer's. Pure arithmetic.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_GAP_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_GAP_H_

#include <cstdint>
#include <limits>

namespace isobit {

// The distance to or from a NaN. No two numbers are that far apart.
inline constexpr uint32_t kNanUlpDistance = std::numeric_limits<uint32_t>::max();

// Logprobs are natural logarithms, probabilities their exp. Both differences are float64.
struct Gap {
  float rollout;
  float scorer;
  bool equal;             // same bits and no NaN
  bool has_nan;           // on either side
  bool impossible;        // on either side: see CanBeDrawn
  double abs_dp;          // |exp(rollout) - exp(scorer)|; 1 where dlogp is NaN
  double dlogp;           // rollout - scorer; NaN with a NaN, and for equal infinities
  uint32_t ulp_distance;  // 0 exactly if `equal`; kNanUlpDistance with a NaN
};

Gap ComputeGap(float rollout, float scorer);

// Whether a token that was drawn can have this logprob: a number from above -infinity to 0.
bool CanBeDrawn(float logprob);

// The number of steps from `a` to `b` through neighbouring fp32 values; -0 and +0 are neighbours,
// since their bits differ. kNanUlpDistance if either is NaN.
uint32_t UlpDistance(float a, float b);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_GAP_H_
