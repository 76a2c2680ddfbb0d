// isobit-bench decode: the rollout's ranks without the engine. Measures a decode step by batch
// size, mode and tensor-parallel size, the share of each class of kernels, and the rate of prefill.
// The model has random weights. Each step draws the tokens of the next on the GPU, as in the
// engine.
#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "bench/kernels/gpu.h"
#include "bench/kernels/model.h"
#include "bench/kernels/report.h"
#include "bench/kernels/trace.h"
#include "common/base/status_macros.h"
#include "common/config/flags.h"
#include "common/config/numerics_mode.h"
#include "kernels/model/load_format.h"
#include "kernels/model/prepare_weights.h"
#include "kernels/runtime/cuda_executor.h"
#include "rollout/engine/model_runner.h"
#include "rollout/guesses/speculation.h"

ABSL_FLAG(std::string, decode_model, "qwen3-8b", "decode: a model shape, by isobit-model's name");
ABSL_FLAG(int, decode_layers, 0, "decode: layers of the model, fewer to save time; 0: all");
ABSL_FLAG(int, decode_tp, 4, "decode: tensor-parallel size, one GPU each");
ABSL_FLAG(std::vector<std::string>, decode_modes, std::vector<std::string>({"tree", "vanilla"}),
          "decode: numerics modes; the others are compared with the last");
ABSL_FLAG(std::vector<std::string>, decode_batch, std::vector<std::string>({"1", "64"}),
          "decode: sequences of a step");
ABSL_FLAG(int64_t, decode_context, 1024, "decode: tokens of each sequence before the first step");
ABSL_FLAG(int64_t, decode_group, 1, "decode: consecutive sequences that share their first pages");
ABSL_FLAG(int64_t, decode_shared, 0,
          "decode: tokens that the sequences of a group share, rounded down to whole pages");
ABSL_FLAG(std::vector<std::string>, decode_sharing, std::vector<std::string>({"on"}),
          "decode: on, off or both: whether attention computes shared splits once");
ABSL_FLAG(std::vector<std::string>, decode_times, std::vector<std::string>({"on"}),
          "decode: on, off, or several in turn: whether the parts of steps are timed for metrics");
ABSL_FLAG(
    std::vector<std::string>, decode_guesses, std::vector<std::string>({"0"}),
    "decode: guesses of each sequence, for which steps of 1 + guesses rows a sequence are timed "
    "too; 0: none. rollout/guesses/guess_table.cc holds such times");
ABSL_FLAG(int64_t, decode_max_context, 0,
          "decode: positions that a sequence may have, as --max_context of a rollout; 0: no more "
          "than it gets");
ABSL_FLAG(int, decode_steps, 100, "decode: steps that are timed");
ABSL_FLAG(int64_t, decode_prefill_rows, 8192, "decode: rows of a prefill step");
ABSL_FLAG(int64_t, decode_overlap_rows, isobit::kOverlapRows,
          "decode: least rows of a prefill step that is computed in halves");
ABSL_FLAG(std::vector<std::string>, decode_push_rows, std::vector<std::string>({"-1"}),
          "decode: most rows of a step whose o and down push their partial sums; -1: the default. "
          "Several are compared with the last");
ABSL_FLAG(std::vector<std::string>, decode_push_gb, std::vector<std::string>({"-1"}),
          "decode: GB/s that a rank is expected to push, by which o and down choose tiles; 0: they "
          "do not; -1: the default. Several are compared with the last");
ABSL_FLAG(int, decode_share, 1,
          "decode: divides the model's heads and intermediate size. With 2, a rank at TP 2 has the "
          "layers that the whole model's has at TP 4");
ABSL_FLAG(
    bool, decode_kernels, false,
    "decode: print every kernel's share, not only each class's, also for guesses and prefill");

namespace isobit::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kPageSize = 16;
constexpr int kTracedSteps = 20;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The class of a kernel, by its name.
enum Class { kGemm, kAllReduce, kAttention, kSampling, kRows, kClasses };
constexpr const char* kClassNames[] = {"GEMM", "all-reduce", "attention", "sampling", "other"};

Class ClassOf(const std::string& name) {
  const auto has = [&name](const char* part) { return absl::StrContains(name, part); };
  if (has("AllReduce") || has("Await") || has("TreeOfFours") || has("Barrier") || has("nccl") ||
      has("Shot"))
    return kAllReduce;
  if (has("LogProb") || has("Plain") || has("GatherRows") || has("GatherDraws") || has("Ranked") ||
      has("FeedIds")) {
    return kSampling;
  }
  if (has("Linear") || has("tile::") || has("nvjet") || has("gemm") || has("cutlass") ||
      has("cublas") || has("splitK")) {
    return kGemm;
  }
  if (has("Attention") || has("Decode") || has("Prefill") || has("Fold")) return kAttention;
  return kRows;
}

// Sequences that begin with `context` tokens and grow by one in each step. Each has its own pages,
// but those of its group's first --decode_shared tokens, which are the same tokens.
class Load {
 public:
  Load(const ModelConfig& config, int64_t batch, int64_t context, int64_t steps)
      : batch_(batch), context_(context) {
    const int64_t pages = (context + steps + kPageSize) / kPageSize;
    const int64_t group = absl::GetFlag(FLAGS_decode_group);
    const int64_t shared_pages = absl::GetFlag(FLAGS_decode_shared) / kPageSize;
    std::mt19937 random(5);
    for (int64_t s = 0; s < batch; ++s) {
      const int64_t first = s / group * group;  // of the group
      std::vector<int32_t>& table = pages_.emplace_back(static_cast<size_t>(pages));
      std::iota(table.begin(), table.end(), static_cast<int32_t>(s * pages));
      for (int64_t i = 0; i < context; ++i) {
        const bool shared = s > first && i < shared_pages * kPageSize;
        prompt_.push_back(
            shared ? prompt_[static_cast<size_t>(first * context + i)]
                   : static_cast<int32_t>(random() % static_cast<uint32_t>(config.vocab_size)));
      }
      if (s > first) {
        std::copy_n(pages_[static_cast<size_t>(first)].begin(), shared_pages, table.begin());
      }
    }
  }

  // Whole sequences, as many as a prefill step holds, from `first` on.
  ModelStep Prefill(int64_t first) const {
    const int64_t rows = absl::GetFlag(FLAGS_decode_prefill_rows);
    ModelStep step;
    for (int64_t s = first; s < batch_ && (s - first + 1) * context_ <= rows; ++s) {
      Append(step, s, 0, context_);
      const auto begin = prompt_.begin() + s * context_;
      step.batch.ids.insert(step.batch.ids.end(), begin, begin + context_);
    }
    return step;
  }

  // Each sequence's next token and so many guesses, with a draw for each.
  ModelStep Guess(int64_t number, int64_t guesses) const {
    ModelStep step;
    for (int64_t s = 0; s < batch_; ++s) {
      Append(step, s, context_ + number, 1 + guesses);
      const int64_t last = step.logit_rows.back();
      const LogProbRequest request = step.requests.back();
      step.logit_rows.back() = last - guesses;
      for (int64_t i = 1; i <= guesses; ++i) {
        step.logit_rows.push_back(last - guesses + i);
        step.requests.push_back(request);
        step.results.emplace_back();
      }
    }
    step.batch.ids.assign(step.requests.size(), 1);
    return step;
  }

  ModelStep Decode(int64_t number) const {
    ModelStep step;
    for (int64_t s = 0; s < batch_; ++s) Append(step, s, context_ + number, 1);
    step.batch.ids.assign(static_cast<size_t>(batch_), 1);
    if (number > 0) {
      step.feeds.resize(static_cast<size_t>(batch_));
      std::iota(step.feeds.begin(), step.feeds.end(), 0);
    }
    return step;
  }

 private:
  void Append(ModelStep& step, int64_t s, int64_t position, int64_t rows) const {
    const int64_t first = step.batch.sequences.empty() ? 0
                                                       : step.batch.sequences.back().first_row +
                                                             step.batch.sequences.back().num_rows;
    step.batch.sequences.push_back({.first_row = first,
                                    .num_rows = rows,
                                    .first_position = position,
                                    .pages = pages_[static_cast<size_t>(s)].data()});
    step.logit_rows.push_back(first + rows - 1);
    LogProbRequest& request = step.requests.emplace_back();
    request.sampling.seed = static_cast<uint64_t>(s);
    request.sampling.position = static_cast<uint32_t>(position + rows);
    step.results.emplace_back();
  }

  const int64_t batch_;
  const int64_t context_;
  std::vector<std::vector<int32_t>> pages_;
  std::vector<int32_t> prompt_;
};

// Runs steps [first, last), launching each before the previous one is collected. Returns seconds.
absl::StatusOr<double> RunDecode(ModelRunner& runner, const Load& load, int64_t first,
                                 int64_t last) {
  const Clock::time_point start = Clock::now();
  ModelStep before = load.Decode(first);
  ISOBIT_RETURN_IF_ERROR(runner.Launch(before));
  for (int64_t i = first + 1; i < last; ++i) {
    ModelStep step = load.Decode(i);
    ISOBIT_RETURN_IF_ERROR(runner.Launch(step));
    ISOBIT_RETURN_IF_ERROR(runner.Collect(before));
    before = std::move(step);
  }
  ISOBIT_RETURN_IF_ERROR(runner.Collect(before));
  return SecondsSince(start);
}

// Runs steps with guesses one after the other, as the engine does: what a step begins with depends
// on the one before. Returns seconds.
absl::StatusOr<double> RunGuesses(ModelRunner& runner, const Load& load, int64_t steps,
                                  int64_t guesses) {
  const Clock::time_point start = Clock::now();
  for (int64_t i = 0; i < steps; ++i) {
    ModelStep step = load.Guess(i, guesses);
    step.is_awaited = true;
    ISOBIT_RETURN_IF_ERROR(runner.Launch(step));
    ISOBIT_RETURN_IF_ERROR(runner.Collect(step));
  }
  return SecondsSince(start);
}

// Prefills all sequences. Returns the number of steps.
absl::StatusOr<int64_t> RunPrefill(ModelRunner& runner, const Load& load, int64_t batch) {
  int64_t steps = 0;
  for (int64_t first = 0; first < batch; ++steps) {
    ModelStep step = load.Prefill(first);
    first += static_cast<int64_t>(step.requests.size());
    ISOBIT_RETURN_IF_ERROR(runner.Launch(step));
    ISOBIT_RETURN_IF_ERROR(runner.Collect(step));
  }
  return steps;
}

// Prints the first device's microseconds per step of each class, and when no kernel ran (idle).
void PrintShares(const std::vector<KernelRecord>& records, int64_t steps) {
  std::array<double, kClasses> us = {};
  std::vector<std::pair<double, std::string>> kernels;
  uint64_t begin = 0;
  uint64_t end = 0;
  uint64_t idle = 0;
  for (const KernelRecord& record : records) {
    if (record.device != 0) continue;
    if (begin == 0) begin = end = record.start_ns;
    if (record.start_ns > end) idle += record.start_ns - end;
    // Only the time after earlier kernels have ended: a dependent kernel starts early, and waits.
    const uint64_t from = std::max(record.start_ns, end);
    const double alone = record.end_ns > from ? static_cast<double>(record.end_ns - from) / 1e3 : 0;
    us[ClassOf(record.name)] += alone;
    const auto it = std::find_if(kernels.begin(), kernels.end(),
                                 [&](const auto& k) { return k.second == record.name; });
    if (it == kernels.end()) {
      kernels.emplace_back(alone, record.name);
    } else {
      it->first += alone;
    }
    end = std::max(end, record.end_ns);
  }
  if (end == 0) {
    absl::PrintF("        no kernel was traced\n");
    return;
  }
  const double total = static_cast<double>(end - begin) / 1e3;
  const auto per_step = [steps](double time) { return time / static_cast<double>(steps); };
  absl::PrintF("        traced %.0f us a step:", per_step(total));
  for (int c = 0; c < kClasses; ++c) {
    absl::PrintF(" %s %.0f (%.1f%%),", kClassNames[c], per_step(us[static_cast<size_t>(c)]),
                 100 * us[static_cast<size_t>(c)] / total);
  }
  absl::PrintF(" idle %.0f (%.1f%%)\n", per_step(static_cast<double>(idle) / 1e3),
               100 * static_cast<double>(idle) / 1e3 / total);
  if (!absl::GetFlag(FLAGS_decode_kernels)) return;
  std::sort(kernels.rbegin(), kernels.rend());
  for (const auto& [time, name] : kernels) {
    absl::PrintF("        %8.1f us  %-10s %s\n", per_step(time), kClassNames[ClassOf(name)],
                 name.substr(0, 150));
  }
}

absl::Status BenchGuesses(ModelRunner& runner, const Load& load, int64_t batch,
                          const std::vector<int64_t>& guesses) {
  const int64_t steps = absl::GetFlag(FLAGS_decode_steps);
  for (const int64_t k : guesses) {
    if (k == 0) continue;
    ISOBIT_RETURN_IF_ERROR(RunGuesses(runner, load, 10, k).status());
    ISOBIT_ASSIGN_OR_RETURN(const double seconds, RunGuesses(runner, load, steps, k));
    absl::PrintF("        %d guesses, %d rows: %.1f us/step\n", k, batch * (1 + k),
                 seconds * 1e6 / static_cast<double>(steps));
    if (!absl::GetFlag(FLAGS_decode_kernels)) continue;
    ISOBIT_RETURN_IF_ERROR(StartKernelTrace());
    ISOBIT_RETURN_IF_ERROR(RunGuesses(runner, load, kTracedSteps, k).status());
    ISOBIT_ASSIGN_OR_RETURN(const std::vector<KernelRecord> records, StopKernelTrace());
    PrintShares(records, kTracedSteps);
  }
  return absl::OkStatus();
}

struct Times {
  double step_us = 0;
  double prefill_rate = 0;  // tokens/s
};

absl::StatusOr<Times> BenchBatch(ModelRunner& runner, const ModelConfig& config, int64_t batch,
                                 const std::vector<int64_t>& guesses) {
  const int64_t context = absl::GetFlag(FLAGS_decode_context);
  const int64_t steps = absl::GetFlag(FLAGS_decode_steps);
  constexpr int64_t kWarmUp = 10;
  const Load load(config, batch, context,
                  kWarmUp + steps + kTracedSteps + 1 + *std::ranges::max_element(guesses));
  ISOBIT_RETURN_IF_ERROR(RunPrefill(runner, load, batch).status());
  const Clock::time_point start = Clock::now();
  ISOBIT_RETURN_IF_ERROR(RunPrefill(runner, load, batch).status());
  const double prefill = SecondsSince(start);
  ISOBIT_RETURN_IF_ERROR(RunDecode(runner, load, 0, kWarmUp).status());
  ISOBIT_ASSIGN_OR_RETURN(const double seconds, RunDecode(runner, load, kWarmUp, kWarmUp + steps));
  ISOBIT_RETURN_IF_ERROR(StartKernelTrace());
  ISOBIT_RETURN_IF_ERROR(
      RunDecode(runner, load, kWarmUp + steps, kWarmUp + steps + kTracedSteps).status());
  ISOBIT_ASSIGN_OR_RETURN(const std::vector<KernelRecord> records, StopKernelTrace());
  const Times times = {.step_us = seconds * 1e6 / static_cast<double>(steps),
                       .prefill_rate = static_cast<double>(batch * context) / prefill};
  absl::PrintF("%6d  %9.1f  %16.0f\n", batch, times.step_us, times.prefill_rate);
  PrintShares(records, kTracedSteps);
  ISOBIT_RETURN_IF_ERROR(BenchGuesses(runner, load, batch, guesses));
  if (!absl::GetFlag(FLAGS_decode_kernels)) return times;
  ISOBIT_RETURN_IF_ERROR(StartKernelTrace());
  ISOBIT_ASSIGN_OR_RETURN(const int64_t prefills, RunPrefill(runner, load, batch));
  ISOBIT_ASSIGN_OR_RETURN(const std::vector<KernelRecord> of_prefill, StopKernelTrace());
  absl::PrintF("        prefill:\n");
  PrintShares(of_prefill, prefills);
  return times;
}

// What is compared.
struct Variant {
  std::string mode;
  std::string push_rows;
  std::string push_gb;
  std::string sharing;
  std::string times;

  std::string Name() const {
    std::string name = mode;
    if (push_rows != "-1") absl::StrAppend(&name, ", push ", push_rows);
    if (push_gb != "-1") absl::StrAppend(&name, ", ", push_gb, " GB/s");
    if (sharing != "on") absl::StrAppend(&name, ", sharing ", sharing);
    if (times != "on") absl::StrAppend(&name, ", times ", times);
    return name;
  }
};

std::vector<Variant> VariantsOfFlags() {
  std::vector<Variant> variants;
  for (const std::string& mode : absl::GetFlag(FLAGS_decode_modes)) {
    for (const std::string& rows : absl::GetFlag(FLAGS_decode_push_rows)) {
      for (const std::string& gb : absl::GetFlag(FLAGS_decode_push_gb)) {
        for (const std::string& sharing : absl::GetFlag(FLAGS_decode_sharing)) {
          for (const std::string& times : absl::GetFlag(FLAGS_decode_times)) {
            variants.push_back({mode, rows, gb, sharing, times});
          }
        }
      }
    }
  }
  return variants;
}

absl::Status SetPush(const Variant& variant, CudaRankOptions& ranks) {
  double gb = 0;
  if (!absl::SimpleAtoi(variant.push_rows, &ranks.push_rows) || ranks.push_rows < -1) {
    return absl::InvalidArgumentError(
        absl::StrCat("--decode_push_rows names \"", variant.push_rows, "\": expected -1 or more"));
  }
  if (!absl::SimpleAtod(variant.push_gb, &gb) || !(gb >= 0 || gb == -1)) {
    return absl::InvalidArgumentError(absl::StrCat("--decode_push_gb names \"", variant.push_gb,
                                                   "\": expected -1, or 0 or more"));
  }
  ranks.push_bytes_per_us = gb < 0 ? -1 : gb * 1e3;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Times>> BenchVariant(const std::string& root, const ModelConfig& config,
                                                const Variant& variant,
                                                const std::vector<int64_t>& batches,
                                                const std::vector<int64_t>& guesses) {
  ISOBIT_ASSIGN_OR_RETURN(const NumericsMode mode, ParseNumericsMode(variant.mode));
  const int tp_size = absl::GetFlag(FLAGS_decode_tp);
  const int64_t most_guesses = *std::ranges::max_element(guesses);
  const int64_t most = *std::ranges::max_element(batches);
  const int64_t used =
      absl::GetFlag(FLAGS_decode_context) + absl::GetFlag(FLAGS_decode_steps) + 64 + most_guesses;
  const int64_t positions = std::max(used, absl::GetFlag(FLAGS_decode_max_context));
  std::vector<int> devices(static_cast<size_t>(tp_size));
  std::iota(devices.begin(), devices.end(), 0);
  const int64_t pages = most * ((used + kPageSize) / kPageSize + 1);
  const int64_t prefill_rows = absl::GetFlag(FLAGS_decode_prefill_rows);
  CudaRankOptions ranks;
  ranks.devices = devices;
  ranks.overlap_rows = absl::GetFlag(FLAGS_decode_overlap_rows);
  ranks.max_guesses = static_cast<int>(most_guesses);
  ISOBIT_RETURN_IF_ERROR(SetPush(variant, ranks));
  ranks.sharing = variant.sharing == "on" ? cuda::Sharing::kWhereItPays : cuda::Sharing::kNever;
  ISOBIT_ASSIGN_OR_RETURN(const auto runner,
                          ModelRunner::Create(config,
                                              {.tensor_parallel_size = tp_size,
                                               .mode = mode,
                                               .page_size = kPageSize,
                                               .num_pages = static_cast<int32_t>(pages),
                                               .max_positions = positions,
                                               .time_steps = variant.times == "on",
                                               .make_rank = MakeCudaRank(ranks)},
                                              most * (1 + most_guesses),
                                              std::max(prefill_rows, most * (1 + most_guesses))));
  const Clock::time_point load = Clock::now();
  ResidentStore store = runner->NewStore();
  ISOBIT_RETURN_IF_ERROR(
      PrepareWeights({root, LoadFormat::kDummy}, {.model_path = kBenchModel}, config, store)
          .status());
  ISOBIT_RETURN_IF_ERROR(runner->Serve(store.Take()));
  absl::PrintF("%s, TP %d, loaded in %.1f s\n batch    us/step  prefill tokens/s\n", variant.Name(),
               tp_size, SecondsSince(load));
  std::vector<Times> times;
  for (const int64_t batch : batches) {
    ISOBIT_ASSIGN_OR_RETURN(const Times t, BenchBatch(*runner, config, batch, guesses));
    times.push_back(t);
  }
  return times;
}

absl::Status CheckSwitch(absl::string_view flag, const std::vector<std::string>& values) {
  for (const std::string& value : values) {
    if (value == "on" || value == "off") continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--", flag, ": expected on, off or both, got \"", value, "\""));
  }
  return absl::OkStatus();
}

absl::Status BenchModel(const ModelConfig& config, const std::string& root) {
  ISOBIT_RETURN_IF_ERROR(RequireInRange("decode_tp", absl::GetFlag(FLAGS_decode_tp), 1, 8));
  ISOBIT_RETURN_IF_ERROR(
      RequireInRange("decode_prefill_rows", absl::GetFlag(FLAGS_decode_prefill_rows), 1, 1 << 20));
  ISOBIT_RETURN_IF_ERROR(RequireInRange("decode_context", absl::GetFlag(FLAGS_decode_context), 1,
                                        absl::GetFlag(FLAGS_decode_prefill_rows)));
  ISOBIT_RETURN_IF_ERROR(
      RequireInRange("decode_group", absl::GetFlag(FLAGS_decode_group), 1, 4096));
  ISOBIT_RETURN_IF_ERROR(RequireInRange("decode_shared", absl::GetFlag(FLAGS_decode_shared), 0,
                                        absl::GetFlag(FLAGS_decode_context)));
  ISOBIT_RETURN_IF_ERROR(CheckSwitch("decode_sharing", absl::GetFlag(FLAGS_decode_sharing)));
  ISOBIT_RETURN_IF_ERROR(CheckSwitch("decode_times", absl::GetFlag(FLAGS_decode_times)));
  ISOBIT_RETURN_IF_ERROR(
      RequireInRange("decode_steps", absl::GetFlag(FLAGS_decode_steps), 1, 1 << 20));
  ISOBIT_RETURN_IF_ERROR(
      RequireInRange("decode_max_context", absl::GetFlag(FLAGS_decode_max_context), 0, 1 << 20));
  ISOBIT_ASSIGN_OR_RETURN(const std::vector<int64_t> batches,
                          Numbers("decode_batch", absl::GetFlag(FLAGS_decode_batch), 4096));
  std::vector<int64_t> guesses;
  for (const std::string& text : absl::GetFlag(FLAGS_decode_guesses)) {
    if (int64_t& number = guesses.emplace_back(); !absl::SimpleAtoi(text, &number) || number < 0 ||
                                                  number > static_cast<int64_t>(kMaxGuesses)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--decode_guesses names \"", text, "\": expected 0 to ", kMaxGuesses));
    }
  }
  absl::PrintF("%s, %d layers, context %d\n", absl::GetFlag(FLAGS_decode_model), config.num_layers,
               absl::GetFlag(FLAGS_decode_context));
  const std::vector<Variant> variants = VariantsOfFlags();
  std::vector<std::vector<Times>> times;
  for (const Variant& variant : variants) {
    ISOBIT_ASSIGN_OR_RETURN(auto of_variant, BenchVariant(root, config, variant, batches, guesses));
    times.push_back(std::move(of_variant));
  }
  for (size_t m = 0; m + 1 < variants.size(); ++m) {
    for (size_t b = 0; b < batches.size(); ++b) {
      absl::PrintF("%s to %s, batch %d: %.3f of its step time, %.3f of its prefill time\n",
                   variants[m].Name(), variants.back().Name(), batches[b],
                   times[m][b].step_us / times.back()[b].step_us,
                   times.back()[b].prefill_rate / times[m][b].prefill_rate);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status BenchDecode() {
  return WithDummyModel(absl::GetFlag(FLAGS_decode_model), absl::GetFlag(FLAGS_decode_layers),
                        absl::GetFlag(FLAGS_decode_share), BenchModel);
}

}  // namespace isobit::bench
