// Two engines over ranks that compute nothing take turns, one that measures and one that does not,
// so that whatever else the machine does hits both. The thread that steps also calls the sinks, so
// its CPU time holds all of the host's work.
#include "bench/services/metrics.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "bench/kernels/model.h"
#include "bench/services/null_engine.h"
#include "common/base/check.h"
#include "common/base/status_macros.h"
#include "common/config/flags.h"
#include "common/metrics/metrics.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/runtime/host_executor.h"
#include "rollout/service/generation_metrics.h"
#include "rollout/service/rollout_metrics.h"

ABSL_FLAG(int, metrics_rounds, 400, "metrics: turns of each engine, of which the best counts");
ABSL_FLAG(int, metrics_steps, 100, "metrics: steps of a turn");
ABSL_FLAG(std::string, metrics_model, "smollm2-135m",
          "metrics: a model shape, by isobit-model's name, whose steps on this CPU the cost is "
          "compared with");
ABSL_FLAG(double, metrics_gpu_step_ms, 1.682,
          "metrics: a step on GPUs that the cost is compared with; 1.682 is Qwen3-8B's at TP 4 on "
          "four H200, batch 1 (docs/benchmarks/rollout.md)");

namespace isobit::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kAnswer = 100;  // tokens
constexpr double kMostShare = 0.005;

double MicrosecondsSince(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// CPU time of this thread, which what else runs on the machine does not lengthen.
double ThreadMicroseconds() {
  timespec now;
  ISOBIT_CHECK(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now) == 0);
  return 1e6 * static_cast<double>(now.tv_sec) + 1e-3 * static_cast<double>(now.tv_nsec);
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

class MeasuredSink final : public CountingSink {
 public:
  MeasuredSink(Counts& counts, const GenerationMetrics& metrics)
      : CountingSink(counts), measurement_(metrics) {
    measurement_.Arrive();
  }
  void OnToken(uint32_t sample, SampledToken token) override {
    measurement_.OnToken(sample);
    CountingSink::OnToken(sample, std::move(token));
  }
  void OnSampleEnd(uint32_t sample, SampleEnd end) override {
    measurement_.OnSampleEnd(sample, end.num_completion_tokens);
  }

 private:
  RequestMeasurement measurement_;
};

// An engine under load, with all of a rollout's metrics or none.
class Contender {
 public:
  static absl::StatusOr<std::unique_ptr<Contender>> Create(size_t running, bool measured) {
    std::unique_ptr<Contender> made(new Contender(running));
    ISOBIT_ASSIGN_OR_RETURN(made->engine_, NullEngine::Create({.tensor_parallel_size = 4,
                                                               .max_running = running,
                                                               .time_steps = measured}));
    Load::MakeSink make_sink = [](Counts& counts) -> std::shared_ptr<RequestSink> {
      return std::make_shared<CountingSink>(counts);
    };
    if (measured) {
      made->metrics_.emplace(made->registry_, **made->engine_, made->memory_);
      make_sink = [&metrics = made->metrics_->generation](Counts& counts) {
        return std::make_shared<MeasuredSink>(counts, metrics);
      };
    }
    made->load_.emplace(**made->engine_, 16, kAnswer, make_sink);
    made->Turn(2 * static_cast<int>(kAnswer));  // so that requests end in every turn
    return made;
  }

  // Microseconds of this thread's CPU time for a step, requests' submission included.
  double Turn(int steps) {
    const double start = ThreadMicroseconds();
    for (int i = 0; i < steps; ++i) {
      load_->Fill(running_);
      (*engine_)->Step();
    }
    return (ThreadMicroseconds() - start) / steps;
  }

  // Microseconds of reading all figures.
  double Scrape() const {
    const Clock::time_point start = Clock::now();
    const size_t families = registry_.Collect().size();
    const double time = MicrosecondsSince(start);
    ISOBIT_CHECK(families > 0);
    return time;
  }

 private:
  explicit Contender(size_t running) : running_(running) {}

  const size_t running_;
  const StreamMemory memory_{StreamLimits{}};
  Metrics registry_;
  std::unique_ptr<NullEngine> engine_;
  std::optional<RolloutMetrics> metrics_;  // with metrics
  std::optional<Load> load_;
};

struct Cost {
  double without_us = 0;  // of a step of the host
  double added_us = 0;
  double scrape_us = 0;
};

absl::StatusOr<Cost> Measure(size_t running) {
  ISOBIT_ASSIGN_OR_RETURN(const auto with, Contender::Create(running, true));
  ISOBIT_ASSIGN_OR_RETURN(const auto without, Contender::Create(running, false));
  const int steps = absl::GetFlag(FLAGS_metrics_steps);
  std::vector<double> on, off, scrapes;
  for (int i = 0; i < absl::GetFlag(FLAGS_metrics_rounds); ++i) {
    const bool first = i % 2 == 0;
    if (first) on.push_back(with->Turn(steps));
    off.push_back(without->Turn(steps));
    if (!first) on.push_back(with->Turn(steps));
    scrapes.push_back(with->Scrape());
  }
  // Where other work moves the ranks' threads about, waking them costs more than all metrics. So
  // the turns that were disturbed least are compared.
  const double base = *std::min_element(off.begin(), off.end());
  return Cost{.without_us = base,
              .added_us = *std::min_element(on.begin(), on.end()) - base,
              .scrape_us = Median(std::move(scrapes))};
}

// Microseconds of a step of `running` sequences, on this CPU and one rank.
absl::StatusOr<double> StepOfModel(const ModelConfig& config, const std::string& root,
                                   size_t running) {
  EngineOptions options;
  options.model_root = root;
  options.load_format = LoadFormat::kDummy;
  options.runner = {.tensor_parallel_size = 1,
                    .num_pages = static_cast<int32_t>(running) * 16,
                    .max_positions = 256,
                    .make_rank = MakeHostRank([] { return MakeCpuBackend({}); })};
  options.scheduler = {
      .max_running = running,
      .max_batch_tokens = std::max<int64_t>(256, 32 * static_cast<int64_t>(running))};
  ISOBIT_ASSIGN_OR_RETURN(const auto engine, Engine::Create(config, options));
  ISOBIT_RETURN_IF_ERROR(LoadFirstWeights(*engine, kBenchModel));
  Load load(*engine, 16, 32);
  load.Fill(running);
  engine->Step();  // the prompts
  std::vector<double> times;
  while (times.size() < 20) {
    const Clock::time_point start = Clock::now();
    engine->Step();
    times.push_back(MicrosecondsSince(start));
  }
  return Median(std::move(times));
}

void PrintRow(size_t running, const Cost& cost, double cpu_step_us) {
  const double gpu_us = 1e3 * absl::GetFlag(FLAGS_metrics_gpu_step_ms);
  const double of_cpu = cost.added_us / cpu_step_us;
  const double of_gpu = cost.added_us / gpu_us;
  std::printf("%8zu %10.2f %8.3f %7.2f%% %10.0f %8.4f%% %8.4f%%%s %9.1f %8.4f%%\n", running,
              cost.without_us, cost.added_us, 100 * cost.added_us / cost.without_us, cpu_step_us,
              100 * of_cpu, 100 * of_gpu, std::max(of_cpu, of_gpu) <= kMostShare ? " " : "!",
              cost.scrape_us, 1e-4 * cost.scrape_us);
  std::fflush(stdout);
}

}  // namespace

absl::Status BenchMetrics() {
  ISOBIT_RETURN_IF_ERROR(
      RequireInRange("metrics_rounds", absl::GetFlag(FLAGS_metrics_rounds), 1, 1000000));
  ISOBIT_RETURN_IF_ERROR(
      RequireInRange("metrics_steps", absl::GetFlag(FLAGS_metrics_steps), 1, 1000000));
  ISOBIT_RETURN_IF_ERROR(
      RequireInRange("metrics_gpu_step_ms", absl::GetFlag(FLAGS_metrics_gpu_step_ms), 0.001, 1e6));
  std::printf(
      "What a step's metrics add to the host's CPU time, over 4 ranks that compute nothing; us.\n"
      "Shares: of the host's step, of a step of %s on this CPU, of a step of %.3f ms on GPUs,\n"
      "and of one core for a scrape a second\n"
      "%8s %10s %8s %8s %10s %9s %9s  %9s %9s\n",
      absl::GetFlag(FLAGS_metrics_model).c_str(), absl::GetFlag(FLAGS_metrics_gpu_step_ms),
      "running", "host step", "added", "share", "CPU step", "share", "share", "scrape", "share");
  return WithDummyModel(absl::GetFlag(FLAGS_metrics_model), 0, 1,
                        [](const ModelConfig& config, const std::string& root) -> absl::Status {
                          for (const size_t running : {1, 8, 64}) {
                            ISOBIT_ASSIGN_OR_RETURN(const Cost cost, Measure(running));
                            ISOBIT_ASSIGN_OR_RETURN(const double cpu_step_us,
                                                    StepOfModel(config, root, running));
                            PrintRow(running, cost, cpu_step_us);
                          }
                          return absl::OkStatus();
                        });
}

}  // namespace isobit::bench
