// One warp computes 16 packed weight rows by 8 rows of x, with mma.sync and plain loads.
#include <algorithm>

#include "common/base/round_up.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/sm90/linear/general.h"
#include "kernels/cuda/sm90/linear/layout.h"
#include "kernels/cuda/sm90/linear/output.cuh"
#include "kernels/ops/linear.h"

namespace isobit::cuda {
namespace {

constexpr int kUnitRows = 16;
constexpr int kUnitColumns = 8;
constexpr int kWarps = 4;

struct GeneralArgs {
  const Bf16* x;
  int64_t ldx;
  const std::byte* packed;
  LeafBlocks leaves;
  contract::LeafSum sum;
  LinearTarget target;
};

// Two neighbouring elements of x; +0 beyond the leaf and beyond x's last row.
__device__ __forceinline__ uint32_t LoadX(const GeneralArgs& args, int row, int column, int end) {
  if (row >= args.target.m) return 0;
  const Bf16* x = args.x + row * args.ldx + column;
  const uint32_t low = column < end ? x[0] : 0;
  const uint32_t high = column + 1 < end ? x[1] : 0;
  return low | high << 16;
}

template <LinearOutput kOutput>
__global__ void __launch_bounds__(32 * kWarps)
    LinearGeneralKernel(const __grid_constant__ GeneralArgs args) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4;
  const int q = lane % 4;
  const int first_row =
      static_cast<int>(blockIdx.x) * kTileRows + static_cast<int>(threadIdx.x) / 32 * kUnitRows;
  ReleaseAtStart(args.target);
  WaitForPredecessor();
  ReleaseAfterWait(args.target);
  const uint32_t operation = OperationOf(args.target);
  const std::byte* tile =
      args.packed + int64_t{blockIdx.x} * args.leaves.num_blocks() * kBlockBytes;
  for (int x_row = static_cast<int>(blockIdx.y) * kUnitColumns; x_row < args.target.m;
       x_row += static_cast<int>(gridDim.y) * kUnitColumns) {
    float sums[contract::kLeaves][4];
#pragma unroll
    for (int l = 0; l < contract::kLeaves; ++l) {
      if (l >= args.leaves.num_leaves) break;
#pragma unroll
      for (float& sum : sums[l]) sum = 0.0f;
      const int column = args.leaves.column[l];
      const int end = args.leaves.column[l + 1];
      for (int k = 0; k < end - column; k += contract::kMmaK) {
        // The packed blocks are in the order of the 128-byte swizzle: of row r, 16-byte unit c lies
        // at c ^ (r % 8).
        const std::byte* block =
            tile + (args.leaves.block[l] + k / kBlockColumns) * int64_t{kBlockBytes};
        const auto load_w = [&](int row, int chunk) {
          const int r = first_row % kTileRows + row;
          return *reinterpret_cast<const uint32_t*>(
              block + r * kBlockColumns * static_cast<int>(sizeof(Bf16)) +
              ((chunk ^ (r % 8)) * 16) + q * 4);
        };
        const int chunk = k % kBlockColumns / 8;
        const uint32_t a[4] = {load_w(g, chunk), load_w(g + 8, chunk), load_w(g, chunk + 1),
                               load_w(g + 8, chunk + 1)};
        const uint32_t b[2] = {LoadX(args, x_row + g, column + k + 2 * q, end),
                               LoadX(args, x_row + g, column + k + 2 * q + 8, end)};
        MmaSync(sums[l], a, b);
      }
    }
    float total[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float of_leaf[contract::kLeaves];
#pragma unroll
      for (int l = 0; l < contract::kLeaves; ++l) of_leaf[l] = sums[l][i];
      total[i] = args.sum == contract::LeafSum::kTree
                     ? contract::TreeOf(of_leaf, args.leaves.num_leaves)
                     : contract::ChainOf(of_leaf, args.leaves.num_leaves);
    }
    FinishUnits<kOutput, 1>(args.target, first_row, x_row, total, operation);
  }
}

}  // namespace

absl::Status LaunchLinearGeneral(const LinearArgs& args, const Stream& stream) {
  const LinearShape& shape = args.weight.shape;
  const GeneralArgs kernel_args = {.x = args.x,
                                   .ldx = args.ldx,
                                   .packed = args.weight.packed,
                                   .leaves = BlocksOf(shape),
                                   .sum = shape.sum,
                                   .target = TargetOf(args)};
  constexpr int64_t kMaxGridY = 65535;
  const Grid grid = {
      .blocks = dim3(static_cast<unsigned>(NumTiles(shape)),
                     static_cast<unsigned>(std::min(kMaxGridY, CeilDiv(args.m, kUnitColumns)))),
      .threads = dim3(32 * kWarps)};
  switch (OutputOf(args)) {
    case LinearOutput::kBf16:
      return Launch(&LinearGeneralKernel<LinearOutput::kBf16>, grid, stream, kernel_args);
    case LinearOutput::kFp32:
      return Launch(&LinearGeneralKernel<LinearOutput::kFp32>, grid, stream, kernel_args);
    case LinearOutput::kSwiGlu:
      return Launch(&LinearGeneralKernel<LinearOutput::kSwiGlu>, grid, stream, kernel_args);
  }
  return absl::InternalError("no such output");
}

}  // namespace isobit::cuda
