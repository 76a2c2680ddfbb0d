// Accumulates gap statistics.
#include "trainer_bridge/comparator/statistics.h"

#include <algorithm>
#include <cmath>

namespace isobit {

void GapStatistics::Weights::RaiseScale(double new_log_scale) {
  if (new_log_scale <= log_scale) return;
  const double factor = std::exp(log_scale - new_log_scale);
  sum *= factor;
  sum_of_squares *= factor * factor;
  log_scale = new_log_scale;
}

void GapStatistics::Add(const Gap& gap) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  ++num_tokens_;
  if (!gap.equal) ++num_unequal_;
  if (gap.has_nan) ++num_nan_;
  if (gap.impossible) ++num_impossible_;
  max_abs_dp_ = std::max(max_abs_dp_, gap.abs_dp);
  max_abs_dlogp_ =
      std::max(max_abs_dlogp_, std::isnan(gap.dlogp) ? kInfinity : std::fabs(gap.dlogp));
  max_ulp_distance_ = std::max(max_ulp_distance_, gap.ulp_distance);
  if (!std::isfinite(gap.rollout) || !std::isfinite(gap.scorer)) return;

  ++num_finite_;
  sum_abs_dp_ += gap.abs_dp;
  sum_abs_dlogp_ += std::fabs(gap.dlogp);
  const double log_ratio = -gap.dlogp;
  sum_k1_ += gap.dlogp;
  sum_k2_ += gap.dlogp * gap.dlogp / 2;
  sum_k3_ += std::expm1(log_ratio) - log_ratio;

  weights_.RaiseScale(log_ratio);
  const double weight = std::exp(log_ratio - weights_.log_scale);
  weights_.sum += weight;
  weights_.sum_of_squares += weight * weight;

  const double p = std::exp(static_cast<double>(gap.rollout));
  const double q = std::exp(static_cast<double>(gap.scorer));
  const double n = static_cast<double>(num_finite_);
  const double dp = p - moments_.mean_rollout;
  const double dq = q - moments_.mean_scorer;
  moments_.mean_rollout += dp / n;
  moments_.mean_scorer += dq / n;
  moments_.rollout_squares += dp * (p - moments_.mean_rollout);
  moments_.scorer_squares += dq * (q - moments_.mean_scorer);
  moments_.products += dp * (q - moments_.mean_scorer);
}

void GapStatistics::Merge(const GapStatistics& later) {
  const double n = static_cast<double>(num_finite_);
  const double m = static_cast<double>(later.num_finite_);
  num_tokens_ += later.num_tokens_;
  num_unequal_ += later.num_unequal_;
  num_nan_ += later.num_nan_;
  num_finite_ += later.num_finite_;
  num_impossible_ += later.num_impossible_;
  max_abs_dp_ = std::max(max_abs_dp_, later.max_abs_dp_);
  max_abs_dlogp_ = std::max(max_abs_dlogp_, later.max_abs_dlogp_);
  max_ulp_distance_ = std::max(max_ulp_distance_, later.max_ulp_distance_);
  if (later.num_finite_ == 0) return;

  sum_abs_dp_ += later.sum_abs_dp_;
  sum_abs_dlogp_ += later.sum_abs_dlogp_;
  sum_k1_ += later.sum_k1_;
  sum_k2_ += later.sum_k2_;
  sum_k3_ += later.sum_k3_;

  Weights theirs = later.weights_;
  weights_.RaiseScale(theirs.log_scale);
  theirs.RaiseScale(weights_.log_scale);
  weights_.sum += theirs.sum;
  weights_.sum_of_squares += theirs.sum_of_squares;

  const double dp = later.moments_.mean_rollout - moments_.mean_rollout;
  const double dq = later.moments_.mean_scorer - moments_.mean_scorer;
  const double share = m / (n + m);
  moments_.mean_rollout += dp * share;
  moments_.mean_scorer += dq * share;
  moments_.rollout_squares += later.moments_.rollout_squares + dp * dp * n * share;
  moments_.scorer_squares += later.moments_.scorer_squares + dq * dq * n * share;
  moments_.products += later.moments_.products + dp * dq * n * share;
}

std::optional<double> GapStatistics::pearson_correlation() const {
  if (has_not_finite()) return std::numeric_limits<double>::quiet_NaN();
  if (num_finite_ < 2 || moments_.rollout_squares <= 0 || moments_.scorer_squares <= 0) {
    return std::nullopt;
  }
  // Equals products / sqrt(rollout * scorer). In this form, equal sides give exactly 1, and no
  // product of small sums can underflow.
  const double slope = moments_.products / moments_.rollout_squares;
  const double scale = std::sqrt(moments_.rollout_squares / moments_.scorer_squares);
  return std::clamp(slope * scale, -1.0, 1.0);
}

double GapStatistics::effective_sample_size() const {
  if (has_not_finite()) return std::numeric_limits<double>::quiet_NaN();
  if (num_tokens_ == 0) return 0;
  return weights_.sum * weights_.sum / weights_.sum_of_squares;
}

}  // namespace isobit
