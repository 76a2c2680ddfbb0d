// Names, help texts and where each number comes from.
#include "rollout/service/rollout_metrics.h"

#include <string>
#include <vector>

#include "common/rpc/service_metrics.h"

namespace isobit {
namespace {

// From a tenth of a millisecond to ten seconds.
std::vector<double> TokenSecondsBounds() {
  return {0.0001, 0.0003, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.3, 1, 3, 10};
}

void ObserveSpeculation(Metrics& metrics, const Speculation& speculation, Observations& all) {
  for (size_t d = 0; d < speculation.num_drafters(); ++d) {
    const DraftCounts& counts = speculation.counts(d);
    const auto count = [&](const char* name, const char* help, auto value,
                           prometheus::Labels labels = {}) {
      labels["drafter"] = speculation.name(d);
      all.push_back(metrics.Observe(
          prometheus::MetricType::Counter, name, help,
          [&counts, value] { return static_cast<double>(value(counts)); }, labels));
    };
    count("isobit_spec_decode_num_drafts_total",
          "Steps of a sequence that computed at least one guessed token.",
          [](const DraftCounts& c) { return c.drafts.load(); });
    count("isobit_spec_decode_num_draft_tokens_total", "Guessed tokens that were computed.",
          [](const DraftCounts& c) { return c.draft_tokens.load(); });
    count("isobit_spec_decode_num_accepted_tokens_total",
          "Tokens that sequences got because of right guesses.", [](const DraftCounts& c) {
            int64_t sum = 0;
            for (const auto& accepted : c.accepted) sum += accepted.load();
            return sum;
          });
    for (size_t i = 0; i < speculation.max_guesses(); ++i) {
      count("isobit_spec_decode_num_accepted_tokens_per_pos_total",
            "Of them, those of guesses at that place in their draft.",
            [i](const DraftCounts& c) { return c.accepted[i].load(); },
            {{"position", std::to_string(i)}});
    }
  }
}

void ObserveFastPath(Metrics& metrics, const FastPathCounts& counts, Observations& all) {
  using Count = std::atomic<int64_t>;
  const auto count = [&](const char* name, const char* help, auto value,
                         const prometheus::Labels& labels = {}) {
    all.push_back(metrics.Observe(
        prometheus::MetricType::Counter, name, help,
        [&counts, value] { return static_cast<double>(value(counts)); }, labels));
  };
  const auto field = [](Count FastPathCounts::*of) {
    return [of](const FastPathCounts& c) { return (c.*of).load(); };
  };
  // The names that drafters have, too.
  const prometheus::Labels drafter = {{"drafter", "fast_path"}};
  count("isobit_spec_decode_num_drafts_total",
        "Steps of a sequence that computed at least one guessed token.",
        field(&FastPathCounts::windows), drafter);
  count(
      "isobit_spec_decode_num_draft_tokens_total", "Guessed tokens that were computed.",
      [](const FastPathCounts& c) { return c.verified + c.recomputed; }, drafter);
  count("isobit_spec_decode_num_accepted_tokens_total",
        "Tokens that sequences got because of right guesses.", field(&FastPathCounts::verified),
        drafter);
  count("isobit_fast_path_steps_total", "Steps that the fast path computed.",
        field(&FastPathCounts::steps));
  count("isobit_fast_path_windows_total", "Windows of tokens of the fast path that were verified.",
        field(&FastPathCounts::windows));
  count("isobit_fast_path_rollbacks_total",
        "Of them, those in which a token was not what the contract draws.",
        field(&FastPathCounts::rollbacks));
  const char* const tokens = "isobit_fast_path_tokens_total";
  const char* const help =
      "Tokens of the fast path for requests that must be deterministic, by what became of them.";
  count(tokens, help, field(&FastPathCounts::verified), {{"outcome", "verified"}});
  count(tokens, help, field(&FastPathCounts::recomputed), {{"outcome", "recomputed"}});
}

Observations ObserveEngine(Metrics& metrics, const Engine& engine, const StreamMemory& memory) {
  Observations all;
  const auto load = [&](const char* name, const char* help, auto field,
                        const prometheus::Labels& labels = {}) {
    all.push_back(metrics.Observe(
        prometheus::MetricType::Gauge, name, help,
        [&engine, field] { return static_cast<double>(engine.load().*field); }, labels));
  };
  load("isobit_requests_running", "Requests that are being computed.",
       &EngineLoad::num_running_requests);
  load("isobit_requests_waiting", "Requests that queue.", &EngineLoad::num_waiting_requests);
  load("isobit_tokens_waiting", "Prompt tokens that queue.", &EngineLoad::num_waiting_tokens);
  load("isobit_kv_pages", "KV pages.", &EngineLoad::num_used_pages, {{"state", "used"}});
  load("isobit_kv_pages", "KV pages.", &EngineLoad::num_free_pages, {{"state", "free"}});
  all.push_back(
      metrics.Observe(prometheus::MetricType::Gauge, "isobit_kv_pages_used_ratio",
                      "Share of the KV pages that sequences use, from 0 to 1.", [&engine] {
                        const EngineLoad now = engine.load();
                        const int32_t pages = now.num_used_pages + now.num_free_pages;
                        return pages == 0 ? 0.0 : static_cast<double>(now.num_used_pages) / pages;
                      }));
  load("isobit_kv_pages_cached", "Of the free KV pages, those that hold a prefix nobody uses.",
       &EngineLoad::num_cached_pages);
  const auto prompts = [&](const char* name, const char* help, int64_t PromptCounts::*field) {
    all.push_back(metrics.Observe(
        prometheus::MetricType::Counter, name, help,
        [&engine, field] { return static_cast<double>(engine.load().prompts.*field); }, {}));
  };
  prompts("isobit_prompt_tokens_total", "Prompt tokens of samples that have begun.",
          &PromptCounts::all);
  prompts("isobit_prompt_tokens_cached_total", "Of them, those found computed.",
          &PromptCounts::cached);
  load("isobit_kv_pages_shared", "Of the used KV pages, those that several sequences have.",
       &EngineLoad::num_shared_pages);
  all.push_back(metrics.Observe(
      prometheus::MetricType::Counter, "isobit_preemptions_total",
      "How often a sequence gave its KV pages to others, to be computed again later.",
      [&engine] { return static_cast<double>(engine.load().num_preemptions); }));
  all.push_back(
      metrics.Observe(prometheus::MetricType::Counter, "isobit_steps_total", "Steps of the engine.",
                      [&engine] { return static_cast<double>(engine.step_times().num_steps()); }));
  for (size_t part = 0; part < kStepPartNames.size(); ++part) {
    all.push_back(metrics.Observe(
        prometheus::MetricType::Counter, "isobit_step_seconds_total",
        "Time of the engine's thread, by part of a step. While it waits, the ranks compute.",
        [&engine, part] { return engine.step_times().seconds(static_cast<StepPart>(part)); },
        {{"part", kStepPartNames[part]}}));
  }
  for (size_t part = 0; part < kDevicePartNames.size(); ++part) {
    all.push_back(
        metrics.Observe(prometheus::MetricType::Counter, "isobit_step_device_seconds_total",
                        "Time that the first rank's GPU, or its CPU, has worked on steps, by part.",
                        [&engine, part] {
                          return engine.step_times().device_seconds(static_cast<DevicePart>(part));
                        },
                        {{"part", kDevicePartNames[part]}}));
  }
  ObserveSpeculation(metrics, engine.speculation(), all);
  if (engine.options().scheduler.fast_path.is_on()) {
    ObserveFastPath(metrics, engine.fast_path_counts(), all);
  }
  load("isobit_generation_paused", "1 while generation is paused.", &EngineLoad::paused);
  load("isobit_asleep", "1 while the memory of the KV cache is given back.", &EngineLoad::asleep);

  const auto bytes = [&](const char* of, size_t RankMemory::*field) {
    all.push_back(metrics.Observe(
        prometheus::MetricType::Gauge, "isobit_rank_memory_bytes",
        "Memory of the rank that has taken the most.",
        [&engine, field] { return static_cast<double>(engine.memory().*field); }, {{"of", of}}));
  };
  bytes("weights", &RankMemory::weights);
  bytes("kv_cache", &RankMemory::kv_cache);
  bytes("activations", &RankMemory::activations);

  all.push_back(ObserveWeightVersion(metrics, [&engine] {
    const auto version = engine.weight_version();
    return version != nullptr ? version->id : 0;
  }));
  all.push_back(ObserveHeldBytes(metrics, "requests", memory.requests));
  all.push_back(ObserveHeldBytes(metrics, "results", memory.results));
  return all;
}

}  // namespace

RolloutMetrics::RolloutMetrics(Metrics& metrics, const Engine& engine, const StreamMemory& memory)
    : generation{metrics.AddCounter("isobit_tokens_generated_total",
                                    "Tokens that were sampled for requests."),
                 metrics.AddHistogram("isobit_time_to_first_token_seconds",
                                      "From a request's arrival to a sample's first token.",
                                      SecondsBounds()),
                 metrics.AddHistogram("isobit_time_per_output_token_seconds",
                                      "Of a sample, the mean time from one token to the next.",
                                      TokenSecondsBounds())},
      update_seconds(AddWeightUpdateSeconds(metrics)),
      observations(ObserveEngine(metrics, engine, memory)) {}

}  // namespace isobit
