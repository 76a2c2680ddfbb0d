// Names, help texts and where each number comes from.
#include "trainer_bridge/comparator/comparator_metrics.h"

namespace isobit {

using prometheus::MetricType;

Observations ObserveHistory(Metrics& metrics, const std::shared_ptr<const History>& history) {
  Observations all;
  const auto observe = [&](MetricType type, const char* name, const char* help, auto of_total,
                           const prometheus::Labels& labels = {}) {
    all.push_back(metrics.Observe(
        type, name, help,
        [history, of_total] { return static_cast<double>(of_total(history->Total())); }, labels));
  };
  const auto count = [&](const char* name, const char* help, auto of_total,
                         const prometheus::Labels& labels = {}) {
    observe(MetricType::Counter, name, help, of_total, labels);
  };
  const auto gauge = [&](const char* name, const char* help, auto of_statistics) {
    observe(MetricType::Gauge, name, help, [of_statistics](const v1::CompareSummary& total) {
      return of_statistics(total.statistics());
    });
  };
  using Total = v1::CompareSummary;
  using Statistics = v1::GapStatistics;
  constexpr char kMismatches[] = "isobit_token_mismatches_total";
  constexpr char kMismatchHelp[] =
      "Tokens whose logprobs differ, by what differs; missing: one side has none.";

  count("isobit_sequences_compared_total", "Sequences that were compared.",
        [](const Total& total) { return total.num_sequences(); });
  count("isobit_tokens_compared_total", "Tokens whose logprobs were compared.",
        [](const Total& total) { return total.statistics().num_tokens(); });
  // A NaN counts as an unequal token (statistics.h).
  count(kMismatches, kMismatchHelp,
        [](const Total& total) {
          return total.statistics().num_unequal() - total.statistics().num_nan();
        },
        {{"kind", "bits"}});
  count(kMismatches, kMismatchHelp, [](const Total& total) { return total.statistics().num_nan(); },
        {{"kind", "nan"}});
  all.push_back(metrics.Observe(MetricType::Counter, kMismatches, kMismatchHelp,
                                [history] { return static_cast<double>(history->num_missing()); },
                                {{"kind", "missing"}}));
  count(
      "isobit_impossible_logprobs_total",
      "Tokens with a logprob, on either side, that no token is drawn with: NaN, infinite or above "
      "0; also where both sides have its bits.",
      [](const Total& total) { return total.statistics().num_impossible(); });
  all.push_back(metrics.Observe(
      MetricType::Counter, "isobit_comparisons_refused_total",
      "Comparisons that would have meant nothing, as sides or sequences did not match.",
      [history] { return static_cast<double>(history->num_refused()); }));
  gauge("isobit_logprob_abs_diff_max", "Largest difference of two logprobs.",
        [](const Statistics& all) { return all.max_abs_dlogp(); });
  gauge("isobit_logprob_ulp_max", "Largest distance of two logprobs, in fp32 numbers between them.",
        [](const Statistics& all) { return all.max_ulp_distance(); });
  gauge("isobit_kl_k1", "KL(rollout || scorer), estimated by k1.",
        [](const Statistics& all) { return all.kl_k1(); });
  gauge("isobit_kl_k2", "KL(rollout || scorer), estimated by k2.",
        [](const Statistics& all) { return all.kl_k2(); });
  gauge("isobit_kl_k3", "KL(rollout || scorer), estimated by k3.",
        [](const Statistics& all) { return all.kl_k3(); });
  return all;
}

Observations ObserveSides(Metrics& metrics, const std::shared_ptr<const SideWatch>& sides) {
  Observations all;
  const auto gauge = [&](const char* name, const char* help, const char* side, auto figure) {
    all.push_back(metrics.Observe(
        MetricType::Gauge, name, help,
        [sides, figure] { return static_cast<double>(((*sides).*figure)()); }, {{"side", side}}));
  };
  constexpr char kVersion[] = "isobit_weight_version";
  constexpr char kVersionHelp[] = "Id of the weights that the side serves; 0: none, or no answer.";
  constexpr char kReachable[] = "isobit_side_reachable";
  constexpr char kReachableHelp[] = "1 while the side answers the comparator.";
  gauge(kVersion, kVersionHelp, "rollout", &SideWatch::RolloutVersion);
  gauge(kVersion, kVersionHelp, "scorer", &SideWatch::ScorerVersion);
  gauge(kReachable, kReachableHelp, "rollout", &SideWatch::RolloutAnswers);
  gauge(kReachable, kReachableHelp, "scorer", &SideWatch::ScorerAnswers);
  return all;
}

}  // namespace isobit
