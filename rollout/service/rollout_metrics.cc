// Names and reads the counts of the engine and of its guesser.
#include "rollout/service/rollout_metrics.h"

#include <vector>

#include "common/rpc/service_metrics.h"

namespace isobit {
namespace {

// From a tenth of a millisecond to ten seconds.
std::vector<double> TokenSecondsBounds() {
  return {0.0001, 0.0003, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.3, 1, 3, 10};
}

Observations ObserveEngine(Metrics& metrics, const Engine& engine, const StreamMemory& memory) {
  using Labels = prometheus::Labels;
  Observations all;
  const auto observe = [&](prometheus::MetricType type, const char* name, const char* help,
                           auto value, const Labels& labels) {
    all.push_back(metrics.Observe(
        type, name, help, [value] { return static_cast<double>(value()); }, labels));
  };
  const auto gauge = [&](const char* name, const char* help, auto value,
                         const Labels& labels = {}) {
    observe(prometheus::MetricType::Gauge, name, help, value, labels);
  };
  const auto counter = [&](const char* name, const char* help, auto value,
                           const Labels& labels = {}) {
    observe(prometheus::MetricType::Counter, name, help, value, labels);
  };
  const auto load = [&engine](auto field) {
    return [&engine, field] { return engine.load().*field; };
  };

  gauge("isobit_requests_running", "Requests that are being computed.",
        load(&EngineLoad::num_running_requests));
  gauge("isobit_requests_waiting", "Requests that queue.", load(&EngineLoad::num_waiting_requests));
  gauge("isobit_tokens_waiting", "Prompt tokens that queue.",
        load(&EngineLoad::num_waiting_tokens));
  gauge("isobit_kv_pages", "KV pages.", load(&EngineLoad::num_used_pages), {{"state", "used"}});
  gauge("isobit_kv_pages", "KV pages.", load(&EngineLoad::num_free_pages), {{"state", "free"}});
  gauge("isobit_kv_pages_used_ratio", "Share of the KV pages that sequences use, from 0 to 1.",
        [&engine] {
          const EngineLoad now = engine.load();
          const int32_t pages = now.num_used_pages + now.num_free_pages;
          return pages == 0 ? 0.0 : static_cast<double>(now.num_used_pages) / pages;
        });
  gauge("isobit_kv_pages_cached", "Of the free KV pages, those that hold a prefix nobody uses.",
        load(&EngineLoad::num_cached_pages));
  counter("isobit_prompt_tokens_total", "Prompt tokens of samples that have begun.",
          [&engine] { return engine.load().prompts.all; });
  counter("isobit_prompt_tokens_cached_total", "Of them, those found computed.",
          [&engine] { return engine.load().prompts.cached; });
  gauge("isobit_kv_pages_shared", "Of the used KV pages, those that several sequences have.",
        load(&EngineLoad::num_shared_pages));
  counter("isobit_preemptions_total",
          "How often a sequence gave its KV pages to others, to be computed again later.",
          load(&EngineLoad::num_preemptions));
  counter("isobit_steps_total", "Steps of the engine.",
          [&engine] { return engine.step_times().num_steps(); });
  for (size_t part = 0; part < kStepPartNames.size(); ++part) {
    counter("isobit_step_seconds_total",
            "Time of the engine's thread, by part of a step. While it waits, the ranks compute.",
            [&engine, part] { return engine.step_times().seconds(static_cast<StepPart>(part)); },
            {{"part", kStepPartNames[part]}});
  }
  for (size_t part = 0; part < kDevicePartNames.size(); ++part) {
    counter("isobit_step_device_seconds_total",
            "Time that the first rank's GPU, or its CPU, has worked on steps, by part.",
            [&engine, part] {
              return engine.step_times().device_seconds(static_cast<DevicePart>(part));
            },
            {{"part", kDevicePartNames[part]}});
  }
  const GuesserInfo guesser =
      engine.guesser() != nullptr ? engine.guesser()->info() : GuesserInfo();
  for (const auto& [name, counts] : guesser.drafters) {
    const Labels drafter = {{"drafter", name}};
    counter(
        "isobit_spec_decode_num_drafts_total",
        "Steps of a sequence that computed at least one guessed token.",
        [c = counts] { return c->drafts.load(); }, drafter);
    counter(
        "isobit_spec_decode_num_draft_tokens_total", "Guessed tokens that were computed.",
        [c = counts] { return c->draft_tokens.load(); }, drafter);
    counter(
        "isobit_spec_decode_num_accepted_tokens_total",
        "Tokens that sequences got because of right guesses.",
        [c = counts] { return c->accepted_tokens.load(); }, drafter);
  }
  for (const GuesserCount& count : guesser.more_counts) {
    counter(
        count.name, count.help, [v = count.value] { return v->load(); }, count.labels);
  }
  gauge("isobit_generation_paused", "1 while generation is paused.", load(&EngineLoad::paused));
  gauge("isobit_asleep", "1 while the memory of the KV cache is given back.",
        load(&EngineLoad::asleep));
  const auto bytes = [&](const char* of, size_t RankMemory::*field) {
    gauge("isobit_rank_memory_bytes", "Memory of the rank that has taken the most.",
          [&engine, field] { return engine.memory().*field; }, {{"of", of}});
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
