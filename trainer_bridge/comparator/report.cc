// Builds the comparator's messages.
#include "trainer_bridge/comparator/report.h"

#include <bit>

namespace isobit {
namespace {

v1::Divergence MakeDivergence(const SequenceOutcome& outcome) {
  v1::Divergence divergence;
  divergence.set_sequence_id(outcome.sequence_id);
  divergence.set_position(*outcome.first_divergence);
  return divergence;
}

v1::Verdict VerdictOf(const GapStatistics& statistics) {
  if (statistics.num_tokens() == 0) return v1::VERDICT_NOTHING_COMPARED;
  return statistics.num_unequal() == 0 ? v1::VERDICT_EQUAL : v1::VERDICT_UNEQUAL;
}

}  // namespace

SequenceOutcome CompareTokens(const std::string& sequence_id, const v1::TokenLogprobs& rollout,
                              const v1::TokenLogprobs& scorer) {
  SequenceOutcome outcome;
  outcome.sequence_id = sequence_id;
  for (int i = 0; i < rollout.logprobs_size(); ++i) {
    const Gap gap = ComputeGap(rollout.logprobs(i), scorer.logprobs(i));
    outcome.statistics.Add(gap);
    if (!gap.equal && !outcome.first_divergence) outcome.first_divergence = i;
  }
  return outcome;
}

v1::TokenGap MakeTokenGap(uint32_t position, const v1::TokenLogprobs& rollout,
                          const v1::TokenLogprobs& scorer) {
  const int i = static_cast<int>(position);
  const Gap gap = ComputeGap(rollout.logprobs(i), scorer.logprobs(i));
  v1::TokenGap message;
  message.set_position(position);
  message.set_token_id(rollout.token_ids(i));
  message.set_rollout_logprob(gap.rollout);
  message.set_scorer_logprob(gap.scorer);
  message.set_rollout_bits(std::bit_cast<uint32_t>(gap.rollout));
  message.set_scorer_bits(std::bit_cast<uint32_t>(gap.scorer));
  message.set_abs_dp(gap.abs_dp);
  message.set_dlogp(gap.dlogp);
  message.set_ulp_distance(gap.ulp_distance);
  message.set_equal(gap.equal);
  message.set_rollout_weight_version(rollout.weight_versions(i));
  message.set_scorer_weight_version(scorer.weight_versions(i));
  return message;
}

v1::GapStatistics ToProto(const GapStatistics& statistics) {
  v1::GapStatistics message;
  message.set_num_tokens(statistics.num_tokens());
  message.set_num_unequal(statistics.num_unequal());
  message.set_num_nan(statistics.num_nan());
  message.set_num_finite(statistics.num_finite());
  message.set_max_abs_dp(statistics.max_abs_dp());
  message.set_mean_abs_dp(statistics.mean_abs_dp());
  message.set_max_abs_dlogp(statistics.max_abs_dlogp());
  message.set_mean_abs_dlogp(statistics.mean_abs_dlogp());
  message.set_max_ulp_distance(statistics.max_ulp_distance());
  message.set_kl_k1(statistics.kl_k1());
  message.set_kl_k2(statistics.kl_k2());
  message.set_kl_k3(statistics.kl_k3());
  if (const auto pearson = statistics.pearson_correlation()) {
    message.set_pearson_correlation(*pearson);
  }
  message.set_effective_sample_size(statistics.effective_sample_size());
  return message;
}

v1::SequenceReport MakeReport(const SequenceOutcome& outcome) {
  v1::SequenceReport report;
  report.set_sequence_id(outcome.sequence_id);
  *report.mutable_statistics() = ToProto(outcome.statistics);
  if (outcome.first_divergence) *report.mutable_first_divergence() = MakeDivergence(outcome);
  return report;
}

void SummaryBuilder::Add(const SequenceOutcome& outcome) {
  ++num_sequences_;
  statistics_.Merge(outcome.statistics);
  if (!outcome.first_divergence) return;
  ++num_unequal_sequences_;
  if (!first_divergence_) first_divergence_ = MakeDivergence(outcome);
}

v1::CompareSummary SummaryBuilder::Build() const {
  v1::CompareSummary summary;
  summary.set_verdict(VerdictOf(statistics_));
  summary.set_num_sequences(num_sequences_);
  summary.set_num_unequal_sequences(num_unequal_sequences_);
  *summary.mutable_statistics() = ToProto(statistics_);
  if (first_divergence_) *summary.mutable_first_divergence() = *first_divergence_;
  return summary;
}

}  // namespace isobit
