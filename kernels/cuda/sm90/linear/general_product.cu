// One warp computes 16 rows by 8 columns, with mma.sync and loads of single elements.
#include <algorithm>

#include "common/base/round_up.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/mma_sync.cuh"
#include "kernels/cuda/sm90/linear/general_product.h"

namespace isobit::cuda {
namespace {

constexpr int kUnitRows = 16;
constexpr int kUnitColumns = 8;
constexpr int kWarps = 4;
constexpr int kLevels = 7;  // of the tree over kMaxSegments

// Two neighbouring columns of K of a row, +0 from `end` on.
__device__ __forceinline__ uint32_t LoadA(const GeneralProduct& p, int64_t i, int64_t k,
                                          int64_t end) {
  if (i >= p.rows) return 0;
  const Bf16* const a = p.a + i * p.a_row + k * p.a_k;
  const uint32_t low = k < end ? a[0] : 0;
  const uint32_t high = k + 1 < end ? a[p.a_k] : 0;
  return low | high << 16;
}
__device__ __forceinline__ uint32_t ElementOfB(const GeneralProduct& p, int64_t j, int64_t k) {
  const int64_t row = p.b_transposed ? k : j;
  const int part = p.b.PartOf(row);
  return p.b.data[part][(row - p.b.bounds[part]) * p.ldb + (p.b_transposed ? j : k)];
}
__device__ __forceinline__ uint32_t LoadB(const GeneralProduct& p, int64_t j, int64_t k,
                                          int64_t end) {
  if (j >= p.columns) return 0;
  const uint32_t low = k < end ? ElementOfB(p, j, k) : 0;
  const uint32_t high = k + 1 < end ? ElementOfB(p, j, k + 1) : 0;
  return low | high << 16;
}

__device__ __forceinline__ float* SumAt(const GeneralProduct& p, int64_t i, int64_t j) {
  const int part = p.fp32_out.PartOf(i);
  return p.fp32_out.data[part] + (i - p.fp32_out.bounds[part]) * p.columns + j;
}

__device__ __forceinline__ void Finish(const GeneralProduct& p, int64_t i, int64_t j, float sum) {
  if (i >= p.rows || j >= p.columns) return;
  const int64_t at = i * p.columns + j;
  const float bias = p.bias == nullptr ? 0.0f : p.bias[j];
  if (p.residual != nullptr) {
    p.bf16_out[at] = contract::AddResidual(p.residual[at], sum, bias);
    return;
  }
  if (p.bias != nullptr) sum = contract::Add(sum, bias);
  if (p.bf16_out != nullptr) {
    p.bf16_out[at] = contract::FloatToBf16(sum);
  } else {
    *SumAt(p, i, j) = sum;
  }
}

__global__ void __launch_bounds__(32 * kWarps)
    MultiplyGeneral(const __grid_constant__ GeneralProduct p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4;
  const int q = lane % 4;
  const int64_t column = (int64_t{blockIdx.x} * kWarps + threadIdx.x / 32) * kUnitColumns;
  ReleaseSuccessor();
  WaitForPredecessor();
  for (int64_t row = int64_t{blockIdx.y} * kUnitRows; row < p.rows;
       row += int64_t{gridDim.y} * kUnitRows) {
    // The place of sum e of this thread.
    const auto row_of = [&](int e) { return row + g + e / 2 * 8; };
    const auto column_of = [&](int e) { return column + 2 * q + e % 2; };
    float pending[kLevels][4];
    float sums[4];
    for (int s = 0; s < p.segments; ++s) {
      float chain[4];
      for (int e = 0; e < 4; ++e) {
        const bool starts = p.continues && row_of(e) < p.rows && column_of(e) < p.columns;
        chain[e] = starts ? *SumAt(p, row_of(e), column_of(e)) : 0.0f;
      }
      const int64_t end = p.bounds[s + 1];
      for (int64_t k = p.bounds[s] + 2 * q; k - 2 * q < end; k += contract::kMmaK) {
        const uint32_t a[4] = {LoadA(p, row + g, k, end), LoadA(p, row + g + 8, k, end),
                               LoadA(p, row + g, k + 8, end), LoadA(p, row + g + 8, k + 8, end)};
        const uint32_t b[2] = {LoadB(p, column + g, k, end), LoadB(p, column + g, k + 8, end)};
        MmaSync(chain, a, b);
      }
      int level = 0;
      if (p.combine == contract::LeafSum::kTree) {
        for (; (s >> level & 1) != 0; ++level) {
          for (int e = 0; e < 4; ++e) chain[e] = contract::Add(pending[level][e], chain[e]);
        }
      } else if (s > 0) {
        for (int e = 0; e < 4; ++e) chain[e] = contract::Add(sums[e], chain[e]);
      }
      for (int e = 0; e < 4; ++e) pending[level][e] = sums[e] = chain[e];
    }
    for (int e = 0; e < 4; ++e) Finish(p, row_of(e), column_of(e), sums[e]);
  }
}

}  // namespace

absl::Status LaunchGeneralProduct(const GeneralProduct& product, const Stream& stream) {
  constexpr int64_t kMaxGridY = 65535;
  const Grid grid = {
      .blocks = dim3(static_cast<unsigned>(CeilDiv(product.columns, kUnitColumns * kWarps)),
                     static_cast<unsigned>(std::min(kMaxGridY, CeilDiv(product.rows, kUnitRows)))),
      .threads = dim3(32 * kWarps)};
  return Launch(&MultiplyGeneral, grid, stream, product);
}

}  // namespace isobit::cuda
