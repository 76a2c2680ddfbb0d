// The flags that choose layers, ranks and rows; a layer's operands for our kernel and for cuBLAS.
#include "bench/kernels/gemm_cases.h"

#include <algorithm>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "bench/kernels/report.h"
#include "common/base/status_macros.h"
#include "kernels/blocks/rank_shape.h"
#include "kernels/cuda/sm90/linear/layout.h"
#include "kernels/model/model_plan.h"
#include "tools/model_shapes.h"

ABSL_FLAG(std::vector<std::string>, models,
          std::vector<std::string>({"qwen3-8b", "qwen3-32b", "qwen3-0.6b"}),
          "gemm: model shapes, by the names of isobit-model");
ABSL_FLAG(std::vector<std::string>, tp, std::vector<std::string>({"1", "4", "8"}),
          "gemm: tensor-parallel sizes; rank 0's layers are measured");
ABSL_FLAG(std::vector<std::string>, layers,
          std::vector<std::string>({"qkv", "o", "gate_up", "swiglu", "down", "lm_head"}),
          "gemm: layers; swiglu is gate_up with SwiGLU fused, beside cuBLAS and a SwiGLU kernel");
ABSL_FLAG(std::vector<std::string>, m,
          std::vector<std::string>({"1", "2", "4", "8", "16", "32", "64", "128", "256", "512",
                                    "1024", "4096", "16384"}),
          "gemm: rows (tokens)");
ABSL_FLAG(
    std::string, l2, "cold",
    "gemm: cold: calls use copies of the weights in turn, more than three times the L2; warm: "
    "always the same weights");
namespace isobit::bench {
namespace {

absl::StatusOr<std::vector<Layer>> LayersOf(const std::string& model, int64_t tp) {
  ISOBIT_ASSIGN_OR_RETURN(const ModelConfig config, NamedModelShape(model));
  ISOBIT_ASSIGN_OR_RETURN(const RankShape rank, ShapeOfRank(config, 0, static_cast<int>(tp)));
  const ModelPlan plan(config);
  const auto linear = [&](size_t block, const char* name) {
    return LinearOf(*FindParameter(plan.parameters[block], name), rank);
  };
  const size_t head = plan.parameters.size() - 1;
  const Layer all[] = {{model, tp, "qkv", linear(1, "qkv"), Output::kBf16},
                       {model, tp, "o", linear(1, "o"), Output::kFp32},
                       {model, tp, "gate_up", linear(2, "gate_up"), Output::kBf16},
                       {model, tp, "swiglu", linear(2, "gate_up"), Output::kSwiGlu},
                       {model, tp, "down", linear(2, "down"), Output::kFp32},
                       {model, tp, "lm_head", linear(head, "head"), Output::kFp32}};
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

int64_t OutputBytes(const Layer& layer, int64_t m, Output output) {
  const int64_t elements = m * layer.shape.n;
  if (output == Output::kSwiGlu) return elements / 2 * int64_t{sizeof(Bf16)};
  return elements * (output == Output::kFp32 ? int64_t{sizeof(float)} : int64_t{sizeof(Bf16)});
}

}  // namespace

absl::StatusOr<std::vector<Layer>> LayersOfFlags() {
  if (absl::GetFlag(FLAGS_l2) != "cold" && absl::GetFlag(FLAGS_l2) != "warm") {
    return absl::InvalidArgumentError("--l2: expected cold or warm");
  }
  ISOBIT_ASSIGN_OR_RETURN(const std::vector<int64_t> sizes,
                          Numbers("tp", absl::GetFlag(FLAGS_tp), 8));
  std::vector<std::string> models = absl::GetFlag(FLAGS_models);
  if (Quick() && models.size() > 1) models.resize(1);
  std::vector<Layer> layers;
  for (const std::string& model : models) {
    for (const int64_t tp : sizes) {
      ISOBIT_ASSIGN_OR_RETURN(const std::vector<Layer> some, LayersOf(model, tp));
      layers.insert(layers.end(), some.begin(), some.end());
    }
  }
  return layers;
}

// The rows of --m; with --quick, those of a few sizes.
absl::StatusOr<std::vector<int64_t>> RowsOfFlags() {
  ISOBIT_ASSIGN_OR_RETURN(std::vector<int64_t> rows, Numbers("m", absl::GetFlag(FLAGS_m), 1 << 20));
  constexpr int64_t kQuick[] = {1, 16, 64, 256, 1024, 4096};
  if (Quick()) {
    std::erase_if(rows, [&](int64_t m) { return std::ranges::count(kQuick, m) == 0; });
  }
  if (rows.empty()) return absl::InvalidArgumentError("--m: nothing to measure");
  return rows;
}

bool ColdWeights() { return absl::GetFlag(FLAGS_l2) == "cold"; }

Output BaselineOutput(const Layer& layer) {
  return layer.output == Output::kFp32 && layer.name != "lm_head" ? Output::kBf16 : layer.output;
}

double BytesOf(const Layer& layer, int64_t m) {
  const LinearShape& shape = layer.shape;
  return static_cast<double>((shape.n + m) * shape.k * int64_t{sizeof(Bf16)} +
                             OutputBytes(layer, m, layer.output));
}
double OperationsOf(const Layer& layer, int64_t m) {
  return 2.0 * static_cast<double>(m * layer.shape.n) * static_cast<double>(layer.shape.k);
}

absl::StatusOr<Buffers> AllocateBuffers(const std::vector<Layer>& layers,
                                        const std::vector<int64_t>& rows) {
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
  return buffers;
}

Calls::Calls(const Harness& harness, const Buffers& the_buffers, const Layer& the_layer,
             int64_t rows)
    : layer(the_layer),
      buffers(the_buffers),
      m(rows),
      stride((cuda::PackedLinearBytes(the_layer.shape) + 255) / 256 * 256) {
  const double floor_us = harness.Roofline(BytesOf(layer, m), OperationsOf(layer, m)) + 3.0;
  const bool cold = ColdWeights();
  const auto sweep = static_cast<int64_t>(3 * harness.device().l2_bytes / stride + 1);
  count =
      std::max(cold ? sweep : 1, std::clamp<int64_t>(static_cast<int64_t>(600 / floor_us), 1, 200));
  copies = cold ? std::min(count, static_cast<int64_t>(buffers.weight_bytes / stride)) : 1;
}

LinearArgs Calls::Args(int64_t call, Output output) const {
  const std::byte* const packed =
      buffers.weights.get() + static_cast<size_t>(call % copies) * stride;
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

Contender Calls::Cublas(Harness& harness, Output output) const {
  return {.call = [this, &harness, output](int64_t i, const cuda::Stream& stream) {
    return harness.cublas().Run(Args(i, output), reinterpret_cast<Bf16*>(buffers.gate_up.get()),
                                stream);
  }};
}

}  // namespace isobit::bench
