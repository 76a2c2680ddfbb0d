// Statistics over the gaps of many tokens, in float64. Only the order of Add and Merge can change
// their bits: the same order gives the same bits.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_STATISTICS_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_STATISTICS_H_

#include <cstdint>
#include <limits>
#include <optional>

#include "trainer_bridge/comparator/gap.h"

namespace isobit {

// Counts and maxima cover all tokens. A NaN counts as an unequal token with the largest gaps; an
// infinity on a side makes dlogp infinite. Means, KL, correlation and sample size become NaN once a
// token's logprobs are not both finite (num_finite < num_tokens), because over the other tokens
// alone they could look like a match. Without tokens they are 0.
// INVARIANT: nothing that is not finite vanishes from a figure
// (GapStatisticsTest.NothingThatIsNotFiniteVanishes).
class GapStatistics {
 public:
  // Adds one token.
  void Add(const Gap& gap);

  // Adds the tokens of `later` as if each were added after the present ones (up to rounding).
  void Merge(const GapStatistics& later);

  uint64_t num_tokens() const { return num_tokens_; }
  uint64_t num_unequal() const { return num_unequal_; }
  uint64_t num_nan() const { return num_nan_; }
  uint64_t num_finite() const { return num_finite_; }
  // Tokens with a logprob, on either side, that no drawn token can have (gap.h).
  uint64_t num_impossible() const { return num_impossible_; }

  double max_abs_dp() const { return max_abs_dp_; }
  double mean_abs_dp() const { return Mean(sum_abs_dp_); }
  double max_abs_dlogp() const { return max_abs_dlogp_; }
  double mean_abs_dlogp() const { return Mean(sum_abs_dlogp_); }
  uint32_t max_ulp_distance() const { return max_ulp_distance_; }

  // Estimates of KL(rollout || scorer) from the rollout's samples (Schulman, "Approximating KL
  // divergence"), with d = log r = scorer - rollout: means of -d, d^2 / 2 and r - 1 - d.
  double kl_k1() const { return Mean(sum_k1_); }
  double kl_k2() const { return Mean(sum_k2_); }
  double kl_k3() const { return Mean(sum_k3_); }

  // The correlation of exp(rollout) and exp(scorer). Unset if undefined: there are fewer than two
  // tokens, or one side is constant.
  std::optional<double> pearson_correlation() const;

  // (sum r)^2 / sum r^2 with the importance weights r = exp(scorer - rollout). Equals num_tokens if
  // all weights are equal.
  double effective_sample_size() const;

 private:
  bool has_not_finite() const { return num_finite_ < num_tokens_; }
  double Mean(double sum) const {
    if (has_not_finite()) return std::numeric_limits<double>::quiet_NaN();
    return num_tokens_ == 0 ? 0.0 : sum / static_cast<double>(num_tokens_);
  }

  // Importance weights scaled by exp(-log_scale), so that no ratio overflows.
  struct Weights {
    double log_scale = -std::numeric_limits<double>::infinity();  // the largest log r so far
    double sum = 0;
    double sum_of_squares = 0;

    void RaiseScale(double new_log_scale);
  };

  // Means and co-moments of the probabilities (Welford's method; merged as in Chan et al.).
  struct Moments {
    double mean_rollout = 0;
    double mean_scorer = 0;
    double rollout_squares = 0;
    double scorer_squares = 0;
    double products = 0;
  };

  uint64_t num_tokens_ = 0;
  uint64_t num_unequal_ = 0;
  uint64_t num_nan_ = 0;
  uint64_t num_finite_ = 0;
  uint64_t num_impossible_ = 0;
  double max_abs_dp_ = 0;
  double max_abs_dlogp_ = 0;
  uint32_t max_ulp_distance_ = 0;
  double sum_abs_dp_ = 0;
  double sum_abs_dlogp_ = 0;
  double sum_k1_ = 0;
  double sum_k2_ = 0;
  double sum_k3_ = 0;
  Weights weights_;
  Moments moments_;
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_STATISTICS_H_
