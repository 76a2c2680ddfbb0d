// The matrix products of training beside cuBLAS: forward, input gradient and weight gradient of the
// layers of whole models.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "bench/kernels/grad.h"
#include "bench/kernels/report.h"
#include "common/base/status_macros.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/vanilla/cublas_products.h"
#include "kernels/cuda/sm90/linear/input_gradient.h"
#include "kernels/cuda/sm90/linear/stacked_linear.h"
#include "kernels/cuda/sm90/linear/weight_gradient.h"
#include "tools/model_shapes.h"

ABSL_FLAG(std::vector<std::string>, grad_models,
          std::vector<std::string>({"qwen3-8b", "qwen3-32b"}),
          "grad: model shapes, by the names of isobit-model");
ABSL_FLAG(int64_t, grad_rows, 16384, "grad: token rows; of lm_head, a quarter");
ABSL_FLAG(bool, grad_tiles, false, "grad: time every tile of the products too, without a split");

namespace isobit::bench {
namespace {

using cuda::CublasProduct;
using cuda::CublasProducts;
using cuda::Product;
using cuda::ProductSchedule;

constexpr double kTarget = 0.95;  // of cuBLAS with bf16 output
constexpr int64_t kPacks[] = {1, 8};

struct Layer {
  std::string model;
  std::string name;
  std::vector<int64_t> parts;  // rows of the weight
  int64_t columns = 0;
  int64_t rows = 0;  // tokens
  contract::LeafPlan leaves = {};
  contract::LeafSum sum = contract::LeafSum::kChain;
  bool logits = false;

  int64_t n() const {
    int64_t sum_of_rows = 0;
    for (const int64_t part : parts) sum_of_rows += part;
    return sum_of_rows;
  }
  double operations() const {
    return 2.0 * static_cast<double>(rows * n()) * static_cast<double>(columns);
  }
};

absl::StatusOr<std::vector<Layer>> LayersOf(const std::string& model) {
  ISOBIT_ASSIGN_OR_RETURN(const ModelConfig config, NamedModelShape(model));
  const int64_t rows = absl::GetFlag(FLAGS_grad_rows);
  const int64_t hidden = config.hidden_size;
  const int64_t heads = int64_t{config.num_heads} * config.head_dim;
  const int64_t kv = int64_t{config.num_kv_heads} * config.head_dim;
  const int64_t middle = config.intermediate_size;
  const contract::LeafPlan of_hidden = contract::PlanColumns(hidden);
  const contract::LeafPlan of_heads =
      contract::PlanKvHeads(config.num_kv_heads, heads / config.num_kv_heads);
  using contract::LeafSum;
  return std::vector<Layer>{
      {model, "qkv", {heads, kv, kv}, hidden, rows, of_hidden},
      {model, "o", {hidden}, heads, rows, of_heads, LeafSum::kTree},
      {model, "gate_up", {middle, middle}, hidden, rows, of_hidden},
      {model, "down", {hidden}, middle, rows, contract::PlanColumns(middle), LeafSum::kTree},
      {model, "lm_head", {config.vocab_size}, hidden, rows / 4, of_hidden, LeafSum::kChain, true}};
}

// Large enough for every layer. `out` is what a product writes.
struct Buffers {
  DeviceMemory weight;  // [n, columns]
  DeviceMemory x;       // [rows, columns]
  DeviceMemory dy;      // [rows, n]
  DeviceMemory out;
  DeviceMemory workspace;
};

struct Case {
  const Layer* layer = nullptr;
  std::string product;
  std::string output;
  double cublas_us = 0;
  double same_us = 0;  // cuBLAS with our type of output
  double ours_us = 0;
  double ratio = 0;
  double same_ratio = 0;
};

// A layer's products.
class Products {
 public:
  Products(const Layer& layer, const Buffers& buffers) : layer_(layer), buffers_(buffers) {}

  CublasProduct Cublas(Product product, bool fp32) const {
    return {.product = product,
            .rows = layer_.rows,
            .n = layer_.n(),
            .columns = layer_.columns,
            .x = Bf16At(buffers_.x),
            .weight = Bf16At(buffers_.weight),
            .dy = Bf16At(buffers_.dy),
            .out = buffers_.out.get(),
            .fp32_out = fp32};
  }
  StackedLinearArgs ForwardArgs() const {
    StackedLinearArgs args;
    args.x = Bf16At(buffers_.x);
    args.ldx = layer_.columns;
    args.m = layer_.rows;
    args.weight = Weight();
    args.leaves = layer_.leaves;
    args.sum = layer_.sum;
    if (layer_.logits) {
      args.fp32_out = reinterpret_cast<float*>(buffers_.out.get());
    } else {
      args.bf16_out = Bf16At(buffers_.out);
    }
    return args;
  }
  absl::Span<const ProductSchedule> ForwardTiles() const {
    if (layer_.sum == contract::LeafSum::kTree) return cuda::kTreeTiles;
    return cuda::kChainTiles;
  }
  InputGradientArgs InputArgs() const {
    InputGradientArgs args;
    args.dy = Bf16At(buffers_.dy);
    args.lddy = layer_.n();
    args.m = layer_.rows;
    args.weight = Weight();
    args.dx = Bf16At(buffers_.out);
    return args;
  }
  // `bounds` outlives the arguments.
  WeightGradientArgs WeightArgs(const std::vector<int64_t>& bounds) const {
    WeightGradientArgs args;
    args.dy = Bf16At(buffers_.dy);
    args.lddy = layer_.n();
    args.x = Bf16At(buffers_.x);
    args.ldx = layer_.columns;
    args.packs = bounds;
    args.parts = static_cast<int>(layer_.parts.size());
    args.columns = layer_.columns;
    float* dw = reinterpret_cast<float*>(buffers_.out.get());
    for (size_t i = 0; i < layer_.parts.size(); ++i) {
      args.part_rows[i] = layer_.parts[i];
      args.dw[i] = dw;
      dw += layer_.parts[i] * layer_.columns;
    }
    return args;
  }
  std::vector<int64_t> Packs(int64_t count) const {
    std::vector<int64_t> bounds;
    for (int64_t i = 0; i <= count; ++i) bounds.push_back(layer_.rows * i / count);
    return bounds;
  }

 private:
  static Bf16* Bf16At(const DeviceMemory& memory) { return reinterpret_cast<Bf16*>(memory.get()); }
  StackedWeight Weight() const {
    StackedWeight weight;
    weight.parts = static_cast<int>(layer_.parts.size());
    weight.columns = layer_.columns;
    const Bf16* data = Bf16At(buffers_.weight);
    for (size_t i = 0; i < layer_.parts.size(); ++i) {
      weight.data[i] = data;
      weight.rows[i] = layer_.parts[i];
      data += layer_.parts[i] * layer_.columns;
    }
    return weight;
  }

  const Layer& layer_;
  const Buffers& buffers_;
};

Contender CublasContender(CublasProducts& cublas, const CublasProduct& product) {
  return {.dependent = false, .call = [&cublas, product](int64_t, const cuda::Stream& stream) {
            return cublas.Run(product, stream.handle);
          }};
}

// Adds the case of ours[i], which writes fp32 or bf16, for each i.
struct Ours {
  std::string product;
  Contender contender;
};
absl::Status RaceProduct(Harness& harness, CublasProducts& cublas, const Layer& layer,
                         const CublasProduct& bf16, bool fp32, const std::vector<Ours>& ours,
                         std::vector<Case>& cases) {
  std::vector<Contender> contenders = {CublasContender(cublas, bf16)};
  if (fp32) {
    CublasProduct same = bf16;
    same.fp32_out = true;
    contenders.push_back(CublasContender(cublas, same));
  }
  const size_t first = contenders.size();
  for (const Ours& one : ours) contenders.push_back(one.contender);
  ISOBIT_ASSIGN_OR_RETURN(const RaceTimes times, harness.Race(contenders, 1, PlanOfFlags()));
  for (size_t i = 0; i < ours.size(); ++i) {
    const std::vector<double>& mine = times[first + i];
    cases.push_back({.layer = &layer,
                     .product = ours[i].product,
                     .output = fp32 ? "fp32" : "bf16",
                     .cublas_us = Median(times[0]),
                     .same_us = Median(times[first - 1]),
                     .ours_us = Median(mine),
                     .ratio = MedianRatio(times[0], mine),
                     .same_ratio = MedianRatio(times[first - 1], mine)});
    const Case& c = cases.back();
    const auto rate = [&](double us) { return layer.operations() / us / 1e6; };
    absl::PrintF("%-10s %-8s %6d x %6d %6d  %-18s %s %9.0f %5.0f %9.0f %5.0f %6.3f%c %6.3f\n",
                 layer.model, layer.name, layer.n(), layer.columns, layer.rows, c.product, c.output,
                 c.cublas_us, rate(c.cublas_us), c.ours_us, rate(c.ours_us), c.ratio,
                 c.ratio < kTarget ? '!' : ' ', c.same_ratio);
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

Contender OursContender(const std::function<absl::Status(const cuda::Stream&)>& launch) {
  return {.dependent = false,
          .call = [launch](int64_t, const cuda::Stream& stream) { return launch(stream); }};
}

// The product as it is chosen and, with --grad_tiles, by every tile. launch(tile, stream): a null
// tile is the choice.
template <class Launch>
std::vector<Ours> Contenders(const std::string& product, absl::Span<const ProductSchedule> tiles,
                             Launch launch) {
  std::vector<Ours> all = {{product, OursContender([launch](const cuda::Stream& stream) {
                              return launch(nullptr, stream);
                            })}};
  if (!absl::GetFlag(FLAGS_grad_tiles)) return all;
  for (const ProductSchedule& tile : tiles) {
    all.push_back({absl::StrCat(product, " ", tile.columns, "/", tile.cluster),
                   OursContender([launch, tile](const cuda::Stream& stream) {
                     return launch(&tile, stream);
                   })});
  }
  return all;
}

absl::Status MeasureLayer(Harness& harness, CublasProducts& cublas, const Layer& layer,
                          const Buffers& buffers, std::vector<Case>& cases) {
  const Products products(layer, buffers);
  using Tile = const ProductSchedule*;
  const std::vector<Ours> forward =
      Contenders("forward", products.ForwardTiles(), [&](Tile tile, const cuda::Stream& stream) {
        const StackedLinearArgs args = products.ForwardArgs();
        return tile == nullptr ? cuda::Run(args, stream)
                               : cuda::LaunchStackedLinearAs(*tile, args, stream);
      });
  ISOBIT_RETURN_IF_ERROR(RaceProduct(harness, cublas, layer,
                                     products.Cublas(Product::kForward, layer.logits), layer.logits,
                                     forward, cases));
  const std::vector<Ours> input =
      Contenders("dX", cuda::kInputGradientTiles, [&](Tile tile, const cuda::Stream& stream) {
        const InputGradientArgs args = products.InputArgs();
        return tile == nullptr ? cuda::Run(args, stream)
                               : cuda::LaunchInputGradientAs(*tile, args, stream);
      });
  ISOBIT_RETURN_IF_ERROR(RaceProduct(harness, cublas, layer,
                                     products.Cublas(Product::kInputGradient, false), false, input,
                                     cases));
  for (const int64_t packs : kPacks) {
    const std::vector<int64_t> bounds = products.Packs(packs);
    const std::vector<Ours> weight =
        Contenders(absl::StrCat("dW ", packs, packs == 1 ? " pack" : " packs"),
                   cuda::kWeightGradientTiles, [&](Tile tile, const cuda::Stream& stream) {
                     const WeightGradientArgs args = products.WeightArgs(bounds);
                     std::byte* const workspace = buffers.workspace.get();
                     if (tile != nullptr) {
                       return cuda::LaunchWeightGradientAs(*tile, args, workspace, stream);
                     }
                     const cuda::Scratch scratch = [&](size_t) { return workspace; };
                     cuda::Stream with_scratch = stream;
                     with_scratch.scratch = &scratch;
                     return cuda::Run(args, with_scratch);
                   });
    ISOBIT_RETURN_IF_ERROR(RaceProduct(harness, cublas, layer,
                                       products.Cublas(Product::kWeightGradient, false), true,
                                       weight, cases));
  }
  return absl::OkStatus();
}

absl::StatusOr<Buffers> AllocateBuffers(const cuda::Card& card, const std::vector<Layer>& layers) {
  int64_t weight = 0;
  int64_t x = 0;
  int64_t dy = 0;
  size_t workspace = 0;
  for (const Layer& layer : layers) {
    weight = std::max(weight, layer.n() * layer.columns);
    x = std::max(x, layer.rows * layer.columns);
    dy = std::max(dy, layer.rows * layer.n());
    const Buffers none;
    const Products products(layer, none);
    for (const int64_t packs : kPacks) {
      const std::vector<int64_t> bounds = products.Packs(packs);
      const WeightGradientArgs args = products.WeightArgs(bounds);
      for (ProductSchedule tile : cuda::kWeightGradientTiles) {
        for (tile.split = 1; tile.split <= packs; tile.split *= 2) {
          workspace = std::max(workspace, cuda::WorkspaceBytesAs(card, tile, args));
        }
      }
    }
  }
  Buffers buffers;
  const auto bytes = [](int64_t elements, size_t size) {
    return static_cast<size_t>(elements) * size;
  };
  ISOBIT_ASSIGN_OR_RETURN(buffers.weight, RandomBf16(bytes(weight, sizeof(Bf16)), 1, 0.02f));
  ISOBIT_ASSIGN_OR_RETURN(buffers.x, RandomBf16(bytes(x, sizeof(Bf16)), 2, 1.0f));
  ISOBIT_ASSIGN_OR_RETURN(buffers.dy, RandomBf16(bytes(dy, sizeof(Bf16)), 3, 1.0f));
  ISOBIT_ASSIGN_OR_RETURN(buffers.out,
                          AllocateDevice(bytes(std::max({weight, x, dy}), sizeof(float))));
  ISOBIT_ASSIGN_OR_RETURN(buffers.workspace, AllocateDevice(workspace));
  return buffers;
}

nlohmann::json ToJson(const Case& c) {
  return {{"model", c.layer->model},
          {"layer", c.layer->name},
          {"n", c.layer->n()},
          {"k", c.layer->columns},
          {"rows", c.layer->rows},
          {"product", c.product},
          {"output", c.output},
          {"cublas_us", c.cublas_us},
          {"cublas_same_output_us", c.same_us},
          {"ours_us", c.ours_us},
          {"ratio", c.ratio},
          {"ratio_same_output", c.same_ratio},
          {"tflop_per_s", c.layer->operations() / c.ours_us / 1e6}};
}

}  // namespace

absl::Status BenchProducts(Harness& harness, nlohmann::json& report) {
  std::vector<Layer> layers;
  for (const std::string& model : absl::GetFlag(FLAGS_grad_models)) {
    ISOBIT_ASSIGN_OR_RETURN(const std::vector<Layer> some, LayersOf(model));
    layers.insert(layers.end(), some.begin(), some.end());
  }
  ISOBIT_ASSIGN_OR_RETURN(const Buffers buffers, AllocateBuffers(harness.card(), layers));
  ISOBIT_ASSIGN_OR_RETURN(const std::unique_ptr<CublasProducts> cublas, CublasProducts::Create());
  absl::PrintF(
      "Matrix products, ours beside cuBLAS (default heuristics, 64 MB workspace): graph replay on "
      "both sides, in turn,\nmedian of %d rounds. ratio = cuBLAS time / ours; cuBLAS writes bf16 "
      "(of logits fp32), as torch asks for it.\nsame: the ratio to cuBLAS with the type of output "
      "that ours has.\n%-10s %-8s %15s %6s  %-18s %s %9s %5s %9s %5s %7s %6s\n",
      PlanOfFlags().rounds, "model", "layer", "N x K", "rows", "product", "out ", "cuBLAS us",
      "TF/s", "ours us", "TF/s", "ratio", "same");
  std::vector<Case> cases;
  for (const Layer& layer : layers) {
    ISOBIT_RETURN_IF_ERROR(MeasureLayer(harness, *cublas, layer, buffers, cases));
  }
  for (const Case& c : cases) report["products"].push_back(ToJson(c));
  return absl::OkStatus();
}

}  // namespace isobit::bench
