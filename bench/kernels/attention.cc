// The subcommand `attention` of isobit-bench: compares decode with the copy rate, and prefill with
// what bench/kernels/attention_baseline.py measured on the same machine.
#include "kernels/contract/attention.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/kernels/gpu.h"
#include "bench/kernels/harness.h"
#include "bench/kernels/report.h"
#include "common/base/status_macros.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/step_tables/sequences.h"
#include "kernels/cuda/sm90/attention/attention.h"

ABSL_FLAG(std::string, baseline, "",
          "attention: the report of bench/kernels/attention_baseline.py");
ABSL_FLAG(int, page_size, 128, "attention: positions of a KV page");
ABSL_FLAG(bool, decode, true, "attention: measure decode too");

namespace isobit::bench {
namespace {

struct Heads {
  int32_t query;
  int32_t kv;
  int32_t dim;
};

// `batch` sequences of `rows` new rows after `past` positions: a decode step or a prefill.
struct Case {
  Heads heads;
  int64_t batch;
  int64_t rows;
  int64_t past;
  double target = 0;   // of the copy rate (decode) or of the baseline's rate (prefill); 0: none
  int64_t group = 1;   // so many consecutive sequences begin with the same pages,
  int64_t shared = 0;  // of so many positions
};

constexpr Heads kOf8b = {32, 8, 128};  // Qwen3-8B at TP 1
constexpr double kTarget = 0.75;
constexpr Case kDecode[] = {{kOf8b, 64, 1, 4095, kTarget},
                            {kOf8b, 64, 1, 32767, kTarget},
                            {kOf8b, 1, 1, 4095},
                            {kOf8b, 1, 1, 32767},
                            {kOf8b, 1, 1, 131071},
                            {kOf8b, 8, 1, 8191},
                            {kOf8b, 256, 1, 1023},
                            {{8, 2, 128}, 1, 1, 1031},  // 8B at TP 4
                            {{8, 2, 128}, 8, 1, 1031},
                            {{8, 2, 128}, 64, 1, 1031},
                            {{8, 2, 128}, 64, 1, 4095, kTarget},
                            {{4, 1, 128}, 64, 1, 32767, kTarget},  // 8B at TP 8
                            {{64, 8, 128}, 64, 1, 4095, kTarget},  // 32B
                            {{16, 8, 128}, 64, 1, 4095, kTarget},  // 0.6B
                            {{32, 8, 64}, 64, 1, 4095, kTarget},   // Llama-3.2-1B
                            {{32, 8, 96}, 64, 1, 4095, kTarget},
                            {{16, 4, 256}, 64, 1, 4095, kTarget},
                            // Samples of a prompt, at TP 4 and TP 1
                            {{8, 2, 128}, 8, 1, 1151, 0, 8, 1024},
                            {{8, 2, 128}, 16, 1, 1151, 0, 8, 1024},
                            {{8, 2, 128}, 32, 1, 1151, 0, 8, 1024},
                            {{8, 2, 128}, 64, 1, 1151, 0, 8, 1024},
                            {{8, 2, 128}, 256, 1, 1151, 0, 8, 1024},
                            {{8, 2, 128}, 512, 1, 1039, 0, 8, 1024},
                            {{8, 2, 128}, 512, 1, 1151, 0, 8, 1024},
                            {{8, 2, 128}, 512, 1, 1279, 0, 8, 1024},
                            {{8, 2, 128}, 512, 1, 1151, 0, 2, 1024},
                            {{8, 2, 128}, 512, 1, 1151, 0, 16, 1024},
                            {{8, 2, 128}, 512, 1, 1151, 0, 1, 0},
                            {{8, 2, 128}, 8, 1, 32895, 0, 8, 32768},
                            {kOf8b, 64, 1, 1151, 0, 8, 1024},
                            {kOf8b, 256, 1, 1151, 0, 8, 1024}};
constexpr Case kPrefill[] = {{kOf8b, 1, 2048, 0},
                             {kOf8b, 1, 8192, 0, kTarget},
                             {kOf8b, 1, 32768, 0},
                             {kOf8b, 8, 2048, 0},
                             {kOf8b, 1, 2048, 6144},  // a chunk of a longer prompt
                             {{8, 2, 128}, 1, 8192, 0, kTarget},
                             {{64, 8, 128}, 1, 8192, 0, kTarget},
                             {{16, 8, 128}, 1, 8192, 0, kTarget},
                             {{32, 8, 64}, 1, 8192, 0, kTarget},
                             {{32, 8, 96}, 1, 8192, 0, kTarget},
                             {{16, 4, 256}, 1, 8192, 0, kTarget}};

// Of different keys and values: what a group shares counts once.
double KvBytes(const Case& c) {
  const int64_t repeated = (c.batch - c.batch / c.group) * c.shared;
  return 4.0 *
         static_cast<double>((c.batch * (c.past + c.rows) - repeated) * c.heads.kv * c.heads.dim);
}
// Floating-point operations of the two products, counting only keys that a row sees.
double Operations(const Case& c) {
  const double seen = static_cast<double>(c.rows) * static_cast<double>(c.past) +
                      static_cast<double>(c.rows) * static_cast<double>(c.rows + 1) / 2;
  return 4.0 * seen * static_cast<double>(c.batch * c.heads.query * c.heads.dim);
}

// One case's operands, in so many sets that each call finds the L2 cold.
class Problem {
 public:
  static absl::StatusOr<std::unique_ptr<Problem>> Create(const Harness& harness, const Case& c) {
    std::unique_ptr<Problem> problem(new Problem);
    const int32_t page_size = absl::GetFlag(FLAGS_page_size);
    const int64_t length = c.past + c.rows;
    const int64_t pages = (length + page_size - 1) / page_size;
    const double sweep = 3.0 * static_cast<double>(harness.device().l2_bytes) / KvBytes(c);
    const int64_t sets = std::clamp<int64_t>(static_cast<int64_t>(sweep) + 1, 1, 32);
    const size_t page_bytes = sizeof(Bf16) * static_cast<size_t>(c.heads.kv * page_size) *
                              static_cast<size_t>(c.heads.dim);
    const size_t cache_bytes = page_bytes * static_cast<size_t>(sets * c.batch * pages);
    const size_t row_bytes = sizeof(Bf16) * static_cast<size_t>(c.batch * c.rows) *
                             static_cast<size_t>(c.heads.query * c.heads.dim);
    ISOBIT_ASSIGN_OR_RETURN(problem->k_, RandomBf16(cache_bytes, 1, 1.0f));
    ISOBIT_ASSIGN_OR_RETURN(problem->v_, RandomBf16(cache_bytes, 2, 1.0f));
    ISOBIT_ASSIGN_OR_RETURN(problem->q_, RandomBf16(row_bytes, 3, 1.0f));
    ISOBIT_ASSIGN_OR_RETURN(problem->out_, AllocateDevice(row_bytes));

    std::vector<int32_t> table(static_cast<size_t>(sets * c.batch * pages));
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(1));
    const auto shared_pages = c.shared / page_size;
    for (int64_t i = 0; i < sets * c.batch; ++i) {
      if (i % c.group == 0) continue;
      std::copy_n(table.begin() + (i - i % c.group) * pages, shared_pages,
                  table.begin() + i * pages);
    }
    const auto add = [&](int64_t set, cuda::Sharing sharing) -> absl::Status {
      std::vector<SequenceRows> sequences;
      for (int64_t i = 0; i < c.batch; ++i) {
        sequences.push_back({.first_row = i * c.rows,
                             .num_rows = c.rows,
                             .first_position = c.past,
                             .pages = table.data() + (set * c.batch + i) * pages});
      }
      problem->uploads_.push_back(std::make_unique<cuda::StepTableUpload>());
      ISOBIT_RETURN_IF_ERROR(problem->uploads_.back()->Upload(
          {}, sequences, page_size, {.sharing = sharing}, harness.stream()));
      problem->args_.push_back(
          {.q = reinterpret_cast<const Bf16*>(problem->q_.get()),
           .ldq = int64_t{c.heads.query} * c.heads.dim,
           .heads = c.heads.query,
           .sequences = {.host = {}, .device = &problem->uploads_.back()->device()},
           .kv = {.k = reinterpret_cast<Bf16*>(problem->k_.get()),
                  .v = reinterpret_cast<Bf16*>(problem->v_.get()),
                  .page_size = page_size,
                  .kv_heads = c.heads.kv,
                  .head_dim = c.heads.dim},
           .scale = contract::AttentionScale(c.heads.dim),
           .out = reinterpret_cast<Bf16*>(problem->out_.get()),
           .ldo = int64_t{c.heads.query} * c.heads.dim});
      return absl::OkStatus();
    };
    for (int64_t set = 0; set < sets; ++set) {
      ISOBIT_RETURN_IF_ERROR(
          add(set, c.group > 1 ? cuda::Sharing::kAlways : cuda::Sharing::kWhereItPays));
    }
    for (int64_t set = 0; set < sets; ++set) {
      ISOBIT_RETURN_IF_ERROR(add(set, cuda::Sharing::kNever));
    }
    problem->workspace_.bytes = cuda::AttentionWorkspaceBytes(problem->args_.front());
    ISOBIT_ASSIGN_OR_RETURN(problem->scratch_, AllocateDevice(problem->workspace_.bytes));
    problem->workspace_.data = problem->scratch_.get();
    return problem;
  }

  int64_t sets() const { return static_cast<int64_t>(args_.size()) / 2; }
  // share: computes what sequences share once; else, the same problem for every sequence alone.
  absl::Status Run(int64_t i, bool share, const cuda::Stream& stream) const {
    const int64_t at = i % sets() + (share ? 0 : sets());
    return cuda::LaunchAttention(args_[static_cast<size_t>(at)], workspace_, stream);
  }

 private:
  Problem() = default;

  DeviceMemory k_, v_, q_, out_, scratch_;
  cuda::AttentionWorkspace workspace_;
  std::vector<std::unique_ptr<cuda::StepTableUpload>> uploads_;
  std::vector<AttentionArgs> args_;  // of every set, then the same without sharing
};

struct Times {
  double us = 0;        // with programmatic dependent launch
  double plain_us = 0;  // without
  double alone_us = 0;  // with it, but without sharing; 0: not measured
};

absl::StatusOr<Times> Measure(Harness& harness, const Case& c) {
  ISOBIT_ASSIGN_OR_RETURN(const std::unique_ptr<Problem> problem, Problem::Create(harness, c));
  const auto run = [&](int64_t i, const cuda::Stream& stream) {
    return problem->Run(i, true, stream);
  };
  const auto alone = [&](int64_t i, const cuda::Stream& stream) {
    return problem->Run(i, false, stream);
  };
  std::vector<Contender> contenders = {{.dependent = true, .call = run},
                                       {.dependent = false, .call = run}};
  if (c.group > 1) contenders.push_back({.dependent = true, .call = alone});
  const double floor_us = harness.Roofline(KvBytes(c), Operations(c)) + 3.0;
  const auto calls = std::max(problem->sets(), static_cast<int64_t>(200 / floor_us));
  ISOBIT_ASSIGN_OR_RETURN(const RaceTimes times, harness.Race(contenders, calls, PlanOfFlags()));
  return Times{Median(times[0]), Median(times[1]), c.group > 1 ? Median(times[2]) : 0};
}

// The baseline's time for a case, in microseconds, and its backend's name; 0 and "" if it has none.
using BaselineTime = std::pair<double, std::string>;
BaselineTime BaselineOf(const nlohmann::json& report, const Case& c) {
  for (const nlohmann::json& entry : report.value("cases", nlohmann::json::array())) {
    const bool same =
        entry.value("heads", 0) == c.heads.query && entry.value("kv_heads", 0) == c.heads.kv &&
        entry.value("head_dim", 0) == c.heads.dim && entry.value("batch", 0) == c.batch &&
        entry.value("rows", 0) == c.rows && entry.value("past", -1) == c.past;
    if (same) return {entry.value("us", 0.0), entry.value("backend", "")};
  }
  return {};
}

absl::StatusOr<nlohmann::json> ReadBaseline() {
  const std::string path = absl::GetFlag(FLAGS_baseline);
  if (path.empty()) return nlohmann::json::object();
  std::ifstream file(path);
  nlohmann::json report = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!report.is_object() || !report.contains("cases") || !report["cases"].is_array()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--baseline: expected a report of attention_baseline.py in \"", path, "\""));
  }
  return report;
}

}  // namespace

absl::Status BenchAttention() {
  const int page_size = absl::GetFlag(FLAGS_page_size);
  if (page_size < 1 || page_size > 65536) {
    return absl::InvalidArgumentError("--page_size: expected 1 to 65536");
  }
  ISOBIT_ASSIGN_OR_RETURN(const nlohmann::json baseline, ReadBaseline());
  ISOBIT_ASSIGN_OR_RETURN(const std::unique_ptr<Harness> harness, Harness::Create());
  nlohmann::json report = MachineReport(*harness);
  absl::PrintF(
      "%sAttention over pages of %d positions in random order: graph replay, median of %d rounds, "
      "KV "
      "cold in L2.\nbaseline: %s\n",
      harness->Describe(), page_size, PlanOfFlags().rounds,
      baseline.value("baseline", std::string("none (--baseline)")));
  int below = 0;
  const auto run = [&](absl::Span<const Case> cases, bool decode) -> absl::Status {
    absl::PrintF(
        "\n%s\n%5s %3s %4s %6s %6s %7s %10s %10s %8s %7s %11s %6s\n",
        decode ? "decode: one row a sequence; GB/s of keys and values, beside the copy rate"
               : "prefill: causal; TFLOP/s of the two products over seen keys, beside the baseline",
        "heads", "kv", "dim", "batch", "rows", "past", "ours us", "no PDL us",
        decode ? "GB/s" : "TFLOP/s", decode ? "of copy" : "of roof", "baseline us", "ratio");
    for (const Case& c : cases) {
      if (Quick() && c.target == 0) continue;
      ISOBIT_ASSIGN_OR_RETURN(const Times times, Measure(*harness, c));
      const double rate = (decode ? KvBytes(c) / 1e3 : Operations(c) / 1e6) / times.us;
      const double share =
          harness->Roofline(decode ? KvBytes(c) : 0, decode ? 0 : Operations(c)) / times.us;
      const auto [baseline_us, backend] = BaselineOf(baseline, c);
      const double ratio = baseline_us / times.us;
      const double reached = decode ? share : ratio;
      const bool missed = c.target > 0 && reached > 0 && reached < c.target;
      below += missed ? 1 : 0;
      absl::PrintF("%5d %3d %4d %6d %6d %7d %10.2f %10.2f %8.0f %6.0f%%", c.heads.query, c.heads.kv,
                   c.heads.dim, c.batch, c.rows, c.past, times.us, times.plain_us, rate,
                   100 * share);
      if (baseline_us > 0) absl::PrintF(" %11.2f %6.3f %s", baseline_us, ratio, backend);
      if (c.group > 1) {
        absl::PrintF("  groups of %d share %d: %.3f of %.2f us without sharing", c.group, c.shared,
                     times.us / times.alone_us, times.alone_us);
      }
      absl::PrintF("%s\n", missed ? " !" : "");
      std::fflush(stdout);
      report["cases"].push_back({{"kind", decode ? "decode" : "prefill"},
                                 {"heads", c.heads.query},
                                 {"kv_heads", c.heads.kv},
                                 {"head_dim", c.heads.dim},
                                 {"batch", c.batch},
                                 {"rows", c.rows},
                                 {"past", c.past},
                                 {"group", c.group},
                                 {"shared", c.shared},
                                 {"alone_us", times.alone_us},
                                 {"us", times.us},
                                 {"without_pdl_us", times.plain_us},
                                 {"rate", rate},
                                 {"share_of_ceiling", share},
                                 {"baseline_us", baseline_us},
                                 {"baseline_backend", backend},
                                 {"target", c.target}});
    }
    return absl::OkStatus();
  };
  // After an error, the cases measured before it are still reported.
  absl::Status measured = absl::GetFlag(FLAGS_decode) ? run(kDecode, true) : absl::OkStatus();
  if (measured.ok()) measured = run(kPrefill, false);
  absl::PrintF(
      "\ntargets: decode %.0f%% of the copy rate at batch 64, prefill %.0f%% of the baseline at "
      "8192; below: %d\n",
      100 * kTarget, 100 * kTarget, below);
  ISOBIT_RETURN_IF_ERROR(WriteReport(report));
  return measured;
}

}  // namespace isobit::bench
