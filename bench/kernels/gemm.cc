// The subcommand `gemm` of isobit-bench: our linear layer beside cuBLAS on the layers of whole
// models.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_format.h"
#include "bench/kernels/gemm_cases.h"
#include "bench/kernels/gemm_schedules.h"
#include "bench/kernels/gpu.h"
#include "bench/kernels/harness.h"
#include "bench/kernels/report.h"
#include "common/base/status_macros.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/sm90/linear/linear.h"

ABSL_FLAG(bool, schedules, false,
          "gemm: times every schedule of each case once and prints a line of JSON for each, for "
          "fitting the table of schedules; not a benchmark");

namespace isobit::bench {
namespace {

struct Case {
  const Layer* layer = nullptr;
  int64_t m = 0;
  double cublas_us = 0;
  double ours_us = 0;   // with programmatic dependent launch
  double plain_us = 0;  // without
  double same_us = 0;   // cuBLAS with our type of output
  double ratio = 0;     // cuBLAS time / ours
  double plain_ratio = 0;
  double same_ratio = 0;
};

// The targets of a range of M: the ratios that each class of layers must reach there.
struct Bucket {
  const char* name;
  int64_t last_m;
  double minimum;
  double tree_minimum;  // of the row-parallel layers at TP 1
  double geomean;       // 0: no target
};
constexpr Bucket kBuckets[] = {{"M <= 32", 32, 1.0, 1.0, 1.2},
                               {"M = 64", 64, 1.0, 1.0, 0},
                               {"M = 128..512", 512, 0.95, 0.95, 0},
                               {"M >= 1024", INT64_MAX, 0.98, 0.96, 0}};
constexpr const char* kClasses[] = {"chain, TP 1", "tree, TP 1", "TP > 1", "all"};

size_t BucketOf(int64_t m) {
  size_t b = 0;
  while (m > kBuckets[b].last_m) ++b;
  return b;
}

bool InClass(const Layer& layer, size_t c) {
  if (c == 3) return true;
  if (layer.tp > 1) return c == 2;
  return c == (layer.shape.sum == contract::LeafSum::kTree ? 1 : 0);
}

double TargetOf(const Layer& layer, int64_t m) {
  const Bucket& bucket = kBuckets[BucketOf(m)];
  return InClass(layer, 1) ? bucket.tree_minimum : bucket.minimum;
}

const char* NameOf(Output output) {
  switch (output) {
    case Output::kBf16:
      return "bf16";
    case Output::kFp32:
      return "fp32";
    case Output::kSwiGlu:
      return "swiglu";
  }
  return "";
}

absl::StatusOr<Case> Measure(Harness& harness, const Calls& calls) {
  const Layer& layer = calls.layer;
  const auto ours = [&](int64_t i, const cuda::Stream& stream) {
    return cuda::Run(calls.Args(i, layer.output), stream);
  };
  std::vector<Contender> contenders = {calls.Cublas(harness, BaselineOutput(layer)),
                                       {.dependent = true, .call = ours},
                                       {.dependent = false, .call = ours}};
  if (layer.output != BaselineOutput(layer))
    contenders.push_back(calls.Cublas(harness, layer.output));
  ISOBIT_ASSIGN_OR_RETURN(const RaceTimes times,
                          harness.Race(contenders, calls.count, PlanOfFlags()));
  const std::vector<double>& same = layer.output == BaselineOutput(layer) ? times[0] : times[3];
  return Case{.layer = &layer,
              .m = calls.m,
              .cublas_us = Median(times[0]),
              .ours_us = Median(times[1]),
              .plain_us = Median(times[2]),
              .same_us = Median(same),
              .ratio = MedianRatio(times[0], times[1]),
              .plain_ratio = MedianRatio(times[0], times[2]),
              .same_ratio = MedianRatio(same, times[1])};
}

void PrintCase(const Harness& harness, const Case& c) {
  const double bytes = BytesOf(*c.layer, c.m);
  const double operations = OperationsOf(*c.layer, c.m);
  absl::PrintF("%-8s %6d %5d %d %6d %9.2f %9.2f %6.3f%c %9.2f %6.3f %6.3f %6.0f %5.0f %4.0f%%\n",
               c.layer->name, c.layer->shape.n, c.layer->shape.k, c.layer->shape.num_leaves, c.m,
               c.cublas_us, c.ours_us, c.ratio, c.ratio < TargetOf(*c.layer, c.m) ? '!' : ' ',
               c.plain_us, c.plain_ratio, c.same_ratio, bytes / c.ours_us / 1e3,
               operations / c.ours_us / 1e6, 100 * harness.Roofline(bytes, operations) / c.ours_us);
  std::fflush(stdout);
}

// Measures every layer at every M, and prints each case as it comes.
absl::Status MeasureAll(Harness& harness, const Buffers& buffers, const std::vector<Layer>& layers,
                        const std::vector<int64_t>& rows, std::vector<Case>& cases) {
  const Layer* previous = nullptr;
  for (const Layer& layer : layers) {
    if (previous == nullptr || previous->model != layer.model || previous->tp != layer.tp) {
      absl::PrintF("\n%s, TP %d\n%-8s %6s %5s %s %6s %9s %9s %7s %9s %6s %6s %6s %5s %5s\n",
                   layer.model, layer.tp, "layer", "N", "K", "L", "M", "cuBLAS us", "ours us",
                   "ratio ", "no PDL us", "ratio", "same", "GB/s", "TF/s", "roof");
    }
    previous = &layer;
    for (const int64_t m : rows) {
      ISOBIT_ASSIGN_OR_RETURN(const Case c, Measure(harness, Calls(harness, buffers, layer, m)));
      PrintCase(harness, c);
      cases.push_back(c);
    }
  }
  return absl::OkStatus();
}

// The ratios alone, a line for each layer and a column for each M.
void PrintRatios(const std::vector<Case>& cases, const std::vector<int64_t>& rows) {
  absl::PrintF("\nratios with PDL\n| model | TP | layer | N x K |");
  for (const int64_t m : rows) absl::PrintF(" %d |", m);
  absl::PrintF("\n|");
  for (size_t i = 0; i < 4 + rows.size(); ++i) absl::PrintF(" --- |");
  for (size_t i = 0; i < cases.size(); ++i) {
    const Layer& layer = *cases[i].layer;
    if (i % rows.size() == 0) {
      absl::PrintF("\n| %s | %d | %s | %d x %d |", layer.model, layer.tp, layer.name, layer.shape.n,
                   layer.shape.k);
    }
    absl::PrintF(" %.2f%s |", cases[i].ratio,
                 cases[i].ratio < TargetOf(layer, cases[i].m) ? "!" : "");
  }
  absl::PrintF("\n");
}

void PrintSummary(const std::vector<Case>& cases) {
  absl::PrintF(
      "\nRatios, cuBLAS time / ours, by range of M and class of layers; target: of each case.\n"
      "same: ratio to cuBLAS with our type of output.\n"
      "%-13s %-12s %5s %8s %8s %8s %8s %7s %6s %6s  %s\n",
      "rows", "class", "cases", "geomean", "no PDL", "same", "its min.", "minimum", "target",
      "below", "at the minimum");
  for (size_t b = 0; b < std::size(kBuckets); ++b) {
    for (size_t k = 0; k < std::size(kClasses); ++k) {
      std::vector<double> ratios;
      std::vector<double> plain;
      std::vector<double> same;
      const Case* worst = nullptr;
      int below = 0;
      double target = 0;
      for (const Case& c : cases) {
        if (BucketOf(c.m) != b || !InClass(*c.layer, k)) continue;
        ratios.push_back(c.ratio);
        plain.push_back(c.plain_ratio);
        same.push_back(c.same_ratio);
        target = TargetOf(*c.layer, c.m);
        below += c.ratio < target ? 1 : 0;
        if (worst == nullptr || c.ratio < worst->ratio) worst = &c;
      }
      if (worst == nullptr) continue;
      const double geomean = GeometricMean(ratios);
      const bool good = below == 0 && (k != 3 || geomean >= kBuckets[b].geomean);
      absl::PrintF(
          "%-13s %-12s %5d %8.3f %8.3f %8.3f %8.3f %7.3f %6.2f %6d  %s TP %d %s M %d: %s\n",
          kBuckets[b].name, kClasses[k], ratios.size(), geomean, GeometricMean(plain),
          GeometricMean(same), *std::ranges::min_element(same), worst->ratio, target, below,
          worst->layer->model, worst->layer->tp, worst->layer->name, worst->m,
          good ? "pass" : "FAIL");
    }
  }
}

nlohmann::json ToJson(const Case& c) {
  return {{"model", c.layer->model},
          {"tp", c.layer->tp},
          {"layer", c.layer->name},
          {"n", c.layer->shape.n},
          {"k", c.layer->shape.k},
          {"leaves", c.layer->shape.num_leaves},
          {"output", NameOf(c.layer->output)},
          {"baseline_output", NameOf(BaselineOutput(*c.layer))},
          {"m", c.m},
          {"cublas_us", c.cublas_us},
          {"ours_us", c.ours_us},
          {"ours_without_pdl_us", c.plain_us},
          {"cublas_same_output_us", c.same_us},
          {"ratio", c.ratio},
          {"ratio_same_output", c.same_ratio},
          {"ratio_without_pdl", c.plain_ratio}};
}

}  // namespace

absl::Status BenchGemm() {
  ISOBIT_ASSIGN_OR_RETURN(const std::vector<int64_t> rows, RowsOfFlags());
  ISOBIT_ASSIGN_OR_RETURN(const std::vector<Layer> layers, LayersOfFlags());
  ISOBIT_ASSIGN_OR_RETURN(const std::unique_ptr<Harness> harness, Harness::Create());
  ISOBIT_ASSIGN_OR_RETURN(const Buffers buffers, AllocateBuffers(layers, rows));
  if (absl::GetFlag(FLAGS_schedules)) {
    for (const Layer& layer : layers) {
      for (const int64_t m : rows) {
        ISOBIT_RETURN_IF_ERROR(SweepSchedules(*harness, Calls(*harness, buffers, layer, m)));
      }
    }
    return absl::OkStatus();
  }
  absl::PrintF(
      "%sLinear, ours beside cuBLAS (default heuristics, 64 MB workspace): graph replay on both "
      "sides, in turn,\nmedian of %d rounds; weights %s in L2, activations as the kernel before "
      "leaves them. ratio = cuBLAS time / ours.\nOurs with programmatic dependent launch, then "
      "without. o and down: ours writes fp32 partial sums, cuBLAS bf16; lm_head: both fp32.\nsame: "
      "ratio to cuBLAS with the type of output that ours has. GB/s and "
      "TFLOP/s of ours with PDL; roof: the ceilings' time / ours.\n",
      harness->Describe(), PlanOfFlags().rounds, ColdWeights() ? "cold" : "warm");
  // After an error, the cases measured before it are still reported.
  std::vector<Case> cases;
  const absl::Status measured = MeasureAll(*harness, buffers, layers, rows, cases);
  PrintRatios(cases, rows);
  PrintSummary(cases);
  nlohmann::json report = MachineReport(*harness);
  for (const Case& c : cases) report["cases"].push_back(ToJson(c));
  ISOBIT_RETURN_IF_ERROR(WriteReport(report));
  return measured;
}

}  // namespace isobit::bench
