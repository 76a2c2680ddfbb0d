// Builds the comparator's messages.
#include "trainer_bridge/comparator/report.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <utility>

namespace isobit {
namespace {

v1::Divergence MakeDivergence(const SequenceOutcome& outcome, uint32_t position) {
  v1::Divergence divergence;
  divergence.set_sequence_id(outcome.sequence_id);
  divergence.set_position(position);
  return divergence;
}

v1::Verdict VerdictOf(const GapStatistics& statistics) {
  if (statistics.num_tokens() == 0) return v1::VERDICT_NOTHING_COMPARED;
  if (statistics.num_unequal() > 0) return v1::VERDICT_UNEQUAL;
  return statistics.num_impossible() > 0 ? v1::VERDICT_IMPOSSIBLE : v1::VERDICT_EQUAL;
}

// Of an ulp distance: 1, 2 to 3, 4 to 15, 16 to 255, ... each twice as wide in bits, but the last.
char StripClass(const Gap& gap) {
  if (gap.impossible) return '9';
  if (gap.equal) return '0';
  constexpr std::array<uint32_t, 7> kBounds = {1, 3, 15, 255, 4095, 65535, 1 << 20};
  const auto* const bound = std::lower_bound(kBounds.begin(), kBounds.end(), gap.ulp_distance);
  return static_cast<char>('1' + (bound - kBounds.begin()));
}

// Keeps the worst, the worst first; of equals the first.
void AddWorst(v1::TokenGap gap, std::vector<v1::TokenGap>& worst) {
  worst.insert(std::upper_bound(worst.begin(), worst.end(), gap, &IsWorse), std::move(gap));
  if (worst.size() > SequenceOutcome::kMaxWorst) worst.pop_back();
}

}  // namespace

bool IsWorse(const v1::TokenGap& a, const v1::TokenGap& b) {
  if (a.impossible() != b.impossible()) return a.impossible();
  if (a.ulp_distance() != b.ulp_distance()) return a.ulp_distance() > b.ulp_distance();
  return std::abs(a.dlogp()) > std::abs(b.dlogp());
}

SequenceOutcome CompareTokens(const std::string& sequence_id, const v1::TokenLogprobs& rollout,
                              const v1::TokenLogprobs& scorer) {
  SequenceOutcome outcome;
  outcome.sequence_id = sequence_id;
  const auto num_tokens = static_cast<size_t>(rollout.logprobs_size());
  const size_t run =
      (num_tokens + SequenceOutcome::kMaxStrip - 1) / SequenceOutcome::kMaxStrip;  // of a character
  outcome.strip.assign(run == 0 ? 0 : (num_tokens + run - 1) / run, '0');
  for (int i = 0; i < rollout.logprobs_size(); ++i) {
    const Gap gap = ComputeGap(rollout.logprobs(i), scorer.logprobs(i));
    outcome.statistics.Add(gap);
    if (gap.equal && !gap.impossible) continue;
    if (!gap.equal && !outcome.first_divergence) outcome.first_divergence = i;
    if (gap.impossible && !outcome.first_impossible) outcome.first_impossible = i;
    char& shown = outcome.strip[static_cast<size_t>(i) / run];
    shown = std::max(shown, StripClass(gap));
    AddWorst(MakeTokenGap(static_cast<uint32_t>(i), rollout, scorer), outcome.worst);
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
  message.set_impossible(gap.impossible);
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
  message.set_num_impossible(statistics.num_impossible());
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
  if (outcome.first_divergence) {
    *report.mutable_first_divergence() = MakeDivergence(outcome, *outcome.first_divergence);
  }
  if (outcome.first_impossible) {
    *report.mutable_first_impossible() = MakeDivergence(outcome, *outcome.first_impossible);
  }
  return report;
}

void SummaryBuilder::Add(const SequenceOutcome& outcome) {
  ++num_sequences_;
  statistics_.Merge(outcome.statistics);
  if (outcome.first_impossible && !first_impossible_) {
    first_impossible_ = MakeDivergence(outcome, *outcome.first_impossible);
  }
  if (!outcome.first_divergence) return;
  ++num_unequal_sequences_;
  if (!first_divergence_) first_divergence_ = MakeDivergence(outcome, *outcome.first_divergence);
}

v1::CompareSummary SummaryBuilder::Build() const {
  v1::CompareSummary summary;
  summary.set_verdict(VerdictOf(statistics_));
  summary.set_num_sequences(num_sequences_);
  summary.set_num_unequal_sequences(num_unequal_sequences_);
  *summary.mutable_statistics() = ToProto(statistics_);
  if (first_divergence_) *summary.mutable_first_divergence() = *first_divergence_;
  if (first_impossible_) *summary.mutable_first_impossible() = *first_impossible_;
  return summary;
}

}  // namespace isobit
