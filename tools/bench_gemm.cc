// The subcommand `gemm` of isobit-bench: our linear layer beside cuBLAS on the layers of whole
// models.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "kernels/cuda/cublas_linear.h"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/linear_layout.h"
#include "kernels/model/rank_shape.h"
#include "tools/bench_gpu.h"
#include "tools/bench_harness.h"
#include "tools/bench_report.h"
#include "tools/model_shapes.h"

ABSL_FLAG(std::vector<std::string>, models,
          std::vector<std::string>({"qwen3-8b", "qwen3-32b", "qwen3-0.6b"}),
          "gemm: model shapes, by the names of isobit-model");
ABSL_FLAG(std::vector<std::string>, tp, std::vector<std::string>({"1", "4", "8"}),
          "gemm: tensor-parallel sizes, of which rank 0 is measured");
ABSL_FLAG(std::vector<std::string>, layers,
          std::vector<std::string>({"qkv", "o", "gate_up", "swiglu", "down", "lm_head"}),
          "gemm: layers; swiglu is gate_up with SwiGLU fused, beside cuBLAS and a SwiGLU kernel");
ABSL_FLAG(std::vector<std::string>, m,
          std::vector<std::string>({"1", "2", "4", "8", "16", "32", "64", "128", "256", "512",
                                    "1024", "4096", "16384"}),
          "gemm: rows (tokens)");
ABSL_FLAG(std::string, l2, "cold",
          "gemm: cold, weights rotate through more than three times the L2; or warm, one weight");

namespace isobit::bench {
namespace {

enum class Output { kBf16, kFp32, kSwiGlu };

struct Layer {
  std::string model;
  int64_t tp = 1;
  std::string name;
  LinearShape shape;
  Output output = Output::kBf16;
};

struct Case {
  const Layer* layer = nullptr;
  int64_t m = 0;
  double cublas_us = 0;
  double ours_us = 0;   // with programmatic dependent launch
  double plain_us = 0;  // without
  double same_us = 0;   // cuBLAS, with ours' type of output
  double ratio = 0;     // cuBLAS time / ours
  double plain_ratio = 0;
  double same_ratio = 0;
};

// One line of the targets: a range of M, and what each class of layers must reach there.
struct Bucket {
  const char* name;
  int64_t last_m;
  double minimum;
  double tree_minimum;  // of the row-parallel layers at TP 1
  double geomean;       // 0: none stated
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

// The rows of --m; with --quick, those of a few sizes.
absl::StatusOr<std::vector<int64_t>> Rows() {
  ISOBIT_ASSIGN_OR_RETURN(std::vector<int64_t> rows, Numbers("m", absl::GetFlag(FLAGS_m), 1 << 20));
  constexpr int64_t kQuick[] = {1, 16, 64, 256, 1024, 4096};
  if (Quick()) {
    std::erase_if(rows, [&](int64_t m) { return std::ranges::count(kQuick, m) == 0; });
  }
  if (rows.empty()) return absl::InvalidArgumentError("--m: nothing to measure");
  return rows;
}

std::vector<std::string> Models() {
  std::vector<std::string> models = absl::GetFlag(FLAGS_models);
  if (Quick() && models.size() > 1) models.resize(1);
  return models;
}

absl::StatusOr<std::vector<Layer>> LayersOf(const std::string& model, int64_t tp) {
  ISOBIT_ASSIGN_OR_RETURN(const ModelConfig config, NamedModelShape(model));
  ISOBIT_ASSIGN_OR_RETURN(const RankShape rank, ShapeOfRank(config, 0, static_cast<int>(tp)));
  LinearShape gated = rank.gate_up;
  gated.gated = true;
  const Layer all[] = {{model, tp, "qkv", rank.qkv, Output::kBf16},
                       {model, tp, "o", rank.o, Output::kFp32},
                       {model, tp, "gate_up", gated, Output::kBf16},
                       {model, tp, "swiglu", gated, Output::kSwiGlu},
                       {model, tp, "down", rank.down, Output::kFp32},
                       {model, tp, "lm_head", rank.head, Output::kFp32}};
  std::vector<Layer> wanted;
  for (const std::string& name : absl::GetFlag(FLAGS_layers)) {
    const auto found = std::ranges::find(all, name, &Layer::name);
    if (found == std::end(all)) {
      return absl::InvalidArgumentError(absl::StrCat("--layers names \"", name, "\""));
    }
    wanted.push_back(*found);
  }
  return wanted;
}

// The rival's output is what an ordinary engine asks for: bf16, and fp32 logits.
Output PeerOutput(const Layer& layer) {
  return layer.output == Output::kFp32 && layer.name != "lm_head" ? Output::kBf16 : layer.output;
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

int64_t OutputBytes(const Layer& layer, int64_t m, Output output) {
  const int64_t elements = m * layer.shape.n;
  if (output == Output::kSwiGlu) return elements / 2 * int64_t{sizeof(Bf16)};
  return elements * (output == Output::kFp32 ? int64_t{sizeof(float)} : int64_t{sizeof(Bf16)});
}

// Buffers large enough for every case.
struct Buffers {
  size_t weight_bytes = 0;
  DeviceMemory weights;
  DeviceMemory x;
  DeviceMemory y;
  DeviceMemory gate_up;  // cuBLAS's, before the SwiGLU kernel
};

LinearArgs ArgsOf(const Layer& layer, int64_t m, Output output, const Buffers& buffers,
                  const std::byte* packed) {
  LinearArgs args{.x = reinterpret_cast<const Bf16*>(buffers.x.get()),
                  .ldx = layer.shape.k,
                  .m = m,
                  .weight = {.shape = layer.shape, .packed = packed},
                  .ldy = output == Output::kSwiGlu ? layer.shape.n / 2 : layer.shape.n};
  Bf16* const bf16 = reinterpret_cast<Bf16*>(buffers.y.get());
  if (output == Output::kBf16) args.bf16_out = bf16;
  if (output == Output::kSwiGlu) args.swiglu_out = bf16;
  if (output == Output::kFp32) args.fp32_out = reinterpret_cast<float*>(buffers.y.get());
  return args;
}

double BytesOf(const Layer& layer, int64_t m) {
  const LinearShape& shape = layer.shape;
  return static_cast<double>((shape.n + m) * shape.k * int64_t{sizeof(Bf16)} +
                             OutputBytes(layer, m, layer.output));
}
double OperationsOf(const Layer& layer, int64_t m) {
  return 2.0 * static_cast<double>(m * layer.shape.n) * static_cast<double>(layer.shape.k);
}

absl::StatusOr<Case> Measure(Harness& harness, const Buffers& buffers, const Layer& layer,
                             int64_t m) {
  const size_t stride = (cuda::PackedLinearBytes(layer.shape) + 255) / 256 * 256;
  const double floor_us = harness.Roofline(BytesOf(layer, m), OperationsOf(layer, m)) + 3.0;
  const bool cold = absl::GetFlag(FLAGS_l2) == "cold";
  const auto sweep = static_cast<int64_t>(3 * harness.device().l2_bytes / stride + 1);
  const int64_t calls =
      std::max(cold ? sweep : 1, std::clamp<int64_t>(static_cast<int64_t>(600 / floor_us), 1, 200));
  const auto sets = cold ? std::min(calls, static_cast<int64_t>(buffers.weight_bytes / stride)) : 1;
  const auto packed = [&](int64_t i) {
    return buffers.weights.get() + static_cast<size_t>(i % sets) * stride;
  };
  const auto ours = [&](int64_t i, const cuda::Stream& stream) {
    return cuda::LaunchLinear(ArgsOf(layer, m, layer.output, buffers, packed(i)), stream);
  };
  const auto cublas = [&](Output output) {
    return [&, output](int64_t i, const cuda::Stream& stream) {
      return harness.cublas().Run(ArgsOf(layer, m, output, buffers, packed(i)),
                                  reinterpret_cast<Bf16*>(buffers.gate_up.get()), stream);
    };
  };
  std::vector<Contender> contenders = {{.call = cublas(PeerOutput(layer))},
                                       {.dependent = true, .call = ours},
                                       {.dependent = false, .call = ours}};
  if (layer.output != PeerOutput(layer)) contenders.push_back({.call = cublas(layer.output)});
  ISOBIT_ASSIGN_OR_RETURN(const RaceTimes times, harness.Race(contenders, calls, PlanOfFlags()));
  const std::vector<double>& same = layer.output == PeerOutput(layer) ? times[0] : times[3];
  return Case{.layer = &layer,
              .m = m,
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
      ISOBIT_ASSIGN_OR_RETURN(const Case c, Measure(harness, buffers, layer, m));
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
      "same: to cuBLAS with the type of output that ours has.\n"
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
          {"peer_output", NameOf(PeerOutput(*c.layer))},
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
  if (absl::GetFlag(FLAGS_l2) != "cold" && absl::GetFlag(FLAGS_l2) != "warm") {
    return absl::InvalidArgumentError("--l2: expected cold or warm");
  }
  ISOBIT_ASSIGN_OR_RETURN(const std::vector<int64_t> rows, Rows());
  ISOBIT_ASSIGN_OR_RETURN(const std::vector<int64_t> sizes,
                          Numbers("tp", absl::GetFlag(FLAGS_tp), 8));
  std::vector<Layer> layers;
  for (const std::string& model : Models()) {
    for (const int64_t tp : sizes) {
      ISOBIT_ASSIGN_OR_RETURN(const std::vector<Layer> some, LayersOf(model, tp));
      layers.insert(layers.end(), some.begin(), some.end());
    }
  }
  ISOBIT_ASSIGN_OR_RETURN(const std::unique_ptr<Harness> harness, Harness::Create());
  size_t x_bytes = 0;
  size_t y_bytes = 0;
  size_t gate_up_bytes = 0;
  Buffers buffers;
  const int64_t max_m = *std::ranges::max_element(rows);
  for (const Layer& layer : layers) {
    x_bytes = std::max(x_bytes, static_cast<size_t>(max_m * layer.shape.k) * sizeof(Bf16));
    y_bytes = std::max(y_bytes, static_cast<size_t>(OutputBytes(layer, max_m, layer.output)));
    if (layer.output == Output::kSwiGlu) {
      gate_up_bytes =
          std::max(gate_up_bytes, static_cast<size_t>(OutputBytes(layer, max_m, Output::kBf16)));
    }
    buffers.weight_bytes = std::max(buffers.weight_bytes, cuda::PackedLinearBytes(layer.shape));
  }
  buffers.weight_bytes = std::max(buffers.weight_bytes, size_t{1} << 30) + 256;
  ISOBIT_ASSIGN_OR_RETURN(buffers.weights, RandomBf16(buffers.weight_bytes, 1, 0.02f));
  ISOBIT_ASSIGN_OR_RETURN(buffers.x, RandomBf16(x_bytes, 2, 1.0f));
  ISOBIT_ASSIGN_OR_RETURN(buffers.y, AllocateDevice(y_bytes));
  ISOBIT_ASSIGN_OR_RETURN(buffers.gate_up, AllocateDevice(gate_up_bytes));

  absl::PrintF(
      "%sLinear, ours beside cuBLAS (default heuristics, 64 MB workspace): graph replay on both "
      "sides, in turn,\nmedian of %d rounds; weights %s in L2, activations as the kernel before "
      "leaves them. ratio = cuBLAS time / ours.\nOurs with programmatic dependent launch, then "
      "without. o and down: ours writes fp32 partial sums, cuBLAS bf16; lm_head: both fp32.\nsame: "
      "ratio to cuBLAS with the type of output that ours has. GB/s and "
      "TFLOP/s of ours with PDL; roof: the ceilings' time / ours.\n",
      harness->Describe(), PlanOfFlags().rounds, absl::GetFlag(FLAGS_l2));
  // What was measured before an error is worth its report.
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
