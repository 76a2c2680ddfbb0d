// Names, help texts and where each number comes from.
#include "trainer_bridge/trainer/trainer_metrics.h"

#include "absl/strings/str_cat.h"

namespace isobit::trainer {

TrainerMetrics::TrainerMetrics()
    : sync_(metrics_->AddHistogram("isobit_trainer_weight_sync_seconds",
                                   "Of a step, until all services have its weights.",
                                   SecondsBounds())),
      compared_(metrics_->AddCounter("isobit_trainer_tokens_compared_total",
                                     "Tokens whose logprobs were compared with the rollout's.")),
      unequal_(metrics_->AddCounter("isobit_trainer_tokens_unequal_total",
                                    "Tokens whose logprobs have other bits, or are NaN.")),
      impossible_(metrics_->AddCounter("isobit_trainer_tokens_impossible_total",
                                       "Tokens with a logprob that no token is drawn with: NaN, "
                                       "infinite or above 0.")) {
  Observe("isobit_trainer_step", "Number of the last optimizer step.", step_);
  Observe("isobit_trainer_reward_mean", "Mean reward of the last step's samples.", reward_);
  // Each step trains on what its own weights drew.
  Observe("isobit_trainer_staleness_mean", "Mean staleness of the last step's tokens, in steps.",
          staleness_);
  Observe("isobit_trainer_logprob_abs_diff_max",
          "Largest difference of two logprobs in the last comparison.", max_abs_dlogp_);
  for (size_t i = 0; i < kl_.size(); ++i) {
    Observe(absl::StrCat("isobit_trainer_kl_k", i + 1),
            absl::StrCat("KL(rollout || trainer) of the last comparison, estimator k", i + 1, "."),
            kl_[i]);
  }
  for (const char* part : kParts) {
    seconds_[part] = &metrics_->AddCounter("isobit_trainer_step_seconds_total",
                                           "Time of the steps, by part.", {{"part", part}});
  }
}

void TrainerMetrics::Observe(const std::string& name, const std::string& help, const Gauge& gauge) {
  observations_.push_back(metrics_->Observe(prometheus::MetricType::Gauge, name, help,
                                            [&gauge] { return gauge.load(); }));
}

void TrainerMetrics::AddComparison(const LogprobGap& gap) {
  compared_.Increment(static_cast<double>(gap.tokens));
  unequal_.Increment(static_cast<double>(gap.unequal));
  impossible_.Increment(static_cast<double>(gap.impossible));
  max_abs_dlogp_ = gap.max_abs_dlogp;
  kl_[0] = gap.kl_k1;
  kl_[1] = gap.kl_k2;
  kl_[2] = gap.kl;
}

void TrainerMetrics::AddStep(int64_t step, double reward,
                             const std::map<std::string, double>& seconds) {
  step_ = static_cast<double>(step);
  reward_ = reward;
  for (const auto& [part, value] : seconds) seconds_.at(part)->Increment(value);
  if (const auto sync = seconds.find("sync"); sync != seconds.end()) sync_.Observe(sync->second);
}

}  // namespace isobit::trainer
