// Names, help texts and where each number comes from.
#include "trainer_bridge/scorer/scorer_metrics.h"

#include "common/rpc/service_metrics.h"

namespace isobit {

using prometheus::MetricType;

ScorerMetrics::ScorerMetrics(Metrics& metrics, const std::shared_ptr<const ByteBudget>& calls)
    : tokens(metrics.AddCounter("isobit_tokens_scored_total",
                                "Tokens whose logprobs were computed for requests.")),
      update_seconds(AddWeightUpdateSeconds(metrics)),
      held_bytes(ObserveHeldBytes(metrics, "calls", calls)) {}

Observations ScorerMetrics::Observe(Metrics& metrics, const Scorer& scorer) {
  Observations all;
  all.push_back(ObserveWeightVersion(metrics, [&scorer] { return scorer.version().id; }));
  all.push_back(metrics.Observe(MetricType::Counter, "isobit_tokens_computed_total",
                                "Tokens of sequences that a forward pass computed.", [&scorer] {
                                  const ScorerWork work = scorer.work();
                                  return static_cast<double>(work.tokens - work.shared_tokens);
                                }));
  all.push_back(metrics.Observe(
      MetricType::Counter, "isobit_prompt_tokens_shared_total",
      "Tokens of sequences that were not computed, because another sequence of the pass begins "
      "with the same ones.",
      [&scorer] { return static_cast<double>(scorer.work().shared_tokens); }));
  all.push_back(metrics.Observe(MetricType::Gauge, "isobit_requests_waiting",
                                "Requests that queue.",
                                [&scorer] { return static_cast<double>(scorer.num_waiting()); }));
  const auto work = [&](const char* name, const char* help, auto figure) {
    all.push_back(metrics.Observe(MetricType::Counter, name, help,
                                  [&scorer, figure] { return figure(scorer.work()); }));
  };
  work("isobit_passes_total", "Forward passes over packed sequences.",
       [](const ScorerWork& done) { return static_cast<double>(done.passes); });
  work("isobit_pass_seconds_total", "Time of the passes, from the start to the end of each.",
       [](const ScorerWork& done) { return std::chrono::duration<double>(done.passing).count(); });
  work(
      "isobit_gather_seconds_total",
      "Of the slowest rank of each pass, time of the gathers, which overlap with computing.",
      [](const ScorerWork& done) { return std::chrono::duration<double>(done.gathering).count(); });
  all.push_back(metrics.Observe(MetricType::Gauge, "isobit_shard_bytes",
                                "Weights of one rank's shard.",
                                [&scorer] { return static_cast<double>(scorer.shard_bytes()); }));
  all.push_back(metrics.Observe(MetricType::Gauge, "isobit_gathered_layers_max",
                                "Most layers that a rank has had whole at one time.",
                                [&scorer] { return static_cast<double>(scorer.peak_blocks()); }));
  return all;
}

}  // namespace isobit
