// Maps operands, chooses tiles or the general kernel, and launches.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/round_up.h"
#include "common/base/status_macros.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/sm90/device/tensor_map.h"
#include "kernels/cuda/sm90/linear/general_product.h"
#include "kernels/cuda/sm90/linear/mapped.cuh"
#include "kernels/cuda/sm90/linear/schedule.h"
#include "kernels/cuda/sm90/linear/stacked_linear.h"
#include "kernels/ops/linear.h"

namespace isobit::cuda {
namespace {

LinearShape ShapeOf(const StackedLinearArgs& args) {
  LinearShape shape = {.n = args.weight.n(),
                       .k = args.weight.columns,
                       .num_leaves = contract::kLeaves,
                       .sum = args.sum};
  std::ranges::copy(args.leaves.bounds, shape.bounds);
  return shape;
}

bool HasTiles(const StackedLinearArgs& args, const LinearShape& shape) {
  const StackedWeight& weight = args.weight;
  bool fits = shape.k > 0 && WholeSteps(shape) && Mappable(args.x, args.ldx);
  for (int i = 0; i < weight.parts; ++i) {
    if (weight.rows[i] == 0) continue;
    const bool last = i + 1 == weight.parts;
    fits = fits && Mappable(weight.data[i], weight.columns) && (last || weight.rows[i] % 8 == 0);
  }
  return fits;
}

ProductSchedule ScheduleOf(const Card& card, const StackedLinearArgs& args,
                           const LinearShape& shape) {
  const LeafBlocks leaves = BlocksOf(shape);
  if (!leaves.uniform) return tile::kRaggedProduct;
  ProductShape product = {.row_tiles = CeilDiv(args.m, 128), .blocks = leaves.num_blocks()};
  std::ranges::copy(args.weight.rows, product.columns);
  return shape.sum == contract::LeafSum::kChain ? ChooseProduct(card, product, kChainTiles)
                                                : ChooseProduct(card, product, kTreeTiles);
}

LinearTarget TargetOf(const StackedLinearArgs& args) {
  LinearTarget target;
  target.y = args.fp32_out != nullptr ? static_cast<void*>(args.fp32_out) : args.bf16_out;
  target.ldy = args.weight.n();
  target.bias = args.bias;
  target.m = static_cast<int32_t>(args.m);
  target.n = static_cast<int32_t>(args.weight.n());
  return target;
}

bool TakesVectors(const StackedLinearArgs& args) {
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  if (args.fp32_out != nullptr) return aligned(args.fp32_out) && args.weight.n() % 4 == 0;
  return aligned(args.bf16_out) && aligned(args.residual) && args.weight.n() % 8 == 0;
}

bool IsEmpty(const StackedLinearArgs& args) { return args.m == 0 || args.weight.n() == 0; }

template <class Work>
absl::Status LaunchTiles(const ProductSchedule& schedule, const StackedLinearArgs& args,
                         const Stream& stream) {
  const LinearShape shape = ShapeOf(args);
  const StackedWeight& weight = args.weight;
  const int columns = schedule.columns;
  Work work;
  work.leaves = BlocksOf(shape);
  const tile::MappedLaunchFn<Work> launch = FindMapped(work, schedule, !work.leaves.uniform);
  if (launch == nullptr || !HasTiles(args, shape)) {
    return absl::InvalidArgumentError(
        absl::StrCat("no kernel of ", columns, " columns, cluster ", schedule.cluster,
                     ", for a weight [", shape.n, ", ", shape.k, "] of ", weight.parts,
                     " parts and x with leading dimension ", args.ldx));
  }
  ISOBIT_ASSIGN_OR_RETURN(work.x, MapMatrix(args.x, args.m, shape.k, args.ldx, 128, kBlockColumns));
  for (int i = 0; i < weight.parts; ++i) {
    if (weight.rows[i] == 0) continue;
    const int part = work.parts++;
    ISOBIT_ASSIGN_OR_RETURN(work.weights[part],
                            MapMatrix(weight.data[i], weight.rows[i], shape.k, shape.k,
                                      columns / schedule.cluster, kBlockColumns));
    work.first_tile[part] = work.order.columns;
    work.first_column[part + 1] = work.first_column[part] + static_cast<int32_t>(weight.rows[i]);
    work.order.columns += static_cast<int32_t>(CeilDiv(weight.rows[i], columns));
  }
  work.order.rows = static_cast<int32_t>(CeilDiv(args.m, 128 * schedule.cluster));
  work.order.band = tile::kBandTiles / schedule.cluster;
  work.units = work.order.rows * work.order.columns;
  work.out.target = TargetOf(args);
  work.residual = args.residual;
  work.out.kind = args.fp32_out != nullptr ? LinearOutput::kFp32 : LinearOutput::kBf16;
  work.out.vectors = TakesVectors(args);
  return launch(work, stream);
}

}  // namespace

absl::Status LaunchStackedLinearAs(const ProductSchedule& schedule, const StackedLinearArgs& args,
                                   const Stream& stream) {
  if (IsEmpty(args)) return absl::OkStatus();
  return args.sum == contract::LeafSum::kTree
             ? LaunchTiles<tile::TreeWork>(schedule, args, stream)
             : LaunchTiles<tile::ChainWork>(schedule, args, stream);
}

absl::Status LaunchGeneralStackedLinear(const StackedLinearArgs& args, const Stream& stream) {
  if (IsEmpty(args)) return absl::OkStatus();
  const StackedWeight& weight = args.weight;
  GeneralProduct product = {.rows = args.m,
                            .columns = weight.n(),
                            .a = args.x,
                            .a_row = args.ldx,
                            .a_k = 1,
                            .ldb = weight.columns,
                            .segments = contract::kLeaves,
                            .combine = args.sum,
                            .bf16_out = args.bf16_out,
                            .bias = args.bias,
                            .residual = args.residual};
  std::ranges::copy(args.leaves.bounds, product.bounds);
  product.b.parts = weight.parts;
  for (int i = 0; i < weight.parts; ++i) {
    product.b.data[i] = weight.data[i];
    product.b.bounds[i + 1] = product.b.bounds[i] + weight.rows[i];
  }
  product.fp32_out.data[0] = args.fp32_out;
  return LaunchGeneralProduct(product, stream);
}

// y = round(combine(leaves of x W^T) + bias), see StackedLinearArgs; all pointers are to GPU
// memory. Needs no workspace. Fast if x, ldx, the weights and their columns are multiples of 16
// bytes, the rows of every stacked matrix but the last are a multiple of 8, and the leaves' bounds
// multiples of 16; otherwise a slower kernel is used. INTERNAL: CUDA refused the launch.
absl::Status Run(const StackedLinearArgs& args, const Stream& stream) {
  const LinearShape shape = ShapeOf(args);
  if (IsEmpty(args) || !HasTiles(args, shape)) return LaunchGeneralStackedLinear(args, stream);
  ISOBIT_ASSIGN_OR_RETURN(const Card* const card, CardOf(stream));
  return LaunchStackedLinearAs(ScheduleOf(*card, args, shape), args, stream);
}

}  // namespace isobit::cuda
