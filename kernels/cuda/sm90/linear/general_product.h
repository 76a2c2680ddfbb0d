// Training's matrix products for shapes and alignments that no other kernel supports: any strides,
// one warp per unit of 16 x 8 sums.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_GENERAL_PRODUCT_H_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_GENERAL_PRODUCT_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/contract/portable.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/ops/linear.h"

namespace isobit::cuda {

// One to three stacked matrices; matrix i has rows [bounds[i], bounds[i + 1]).
template <typename T>
struct StackedMatrix {
  T* data[kMaxParts] = {};
  int64_t bounds[kMaxParts + 1] = {};
  int32_t parts = 1;

  ISOBIT_HD int PartOf(int64_t row) const {
    int part = 0;
    while (part + 1 < parts && row >= bounds[part + 1]) ++part;
    return part;
  }
};

inline constexpr int kMaxSegments = 64;

// y(i, j) = combine(over segments s: chain over k of s of a(i, k) b(j, k)), + bias.
struct GeneralProduct {
  int64_t rows = 0;
  int64_t columns = 0;
  // a(i, k) = a[i * a_row + k * a_k].
  const Bf16* a = nullptr;
  int64_t a_row = 0;
  int64_t a_k = 0;
  // b(j, k): its matrix has row j and column k; transposed: row k and column j.
  StackedMatrix<const Bf16> b;
  int64_t ldb = 0;
  bool b_transposed = false;
  // Segment s is k from bounds[s] to bounds[s + 1]; there is at least one. Their sums are combined
  // in a chain, or in the balanced tree over a power of two.
  int32_t segments = 1;
  int64_t bounds[kMaxSegments + 1] = {};
  contract::LeafSum combine = contract::LeafSum::kChain;
  bool continues = false;  // the first chain starts from y
  // Exactly one output: [rows, columns], without gaps.
  StackedMatrix<float> fp32_out;
  Bf16* bf16_out = nullptr;
  const float* bias = nullptr;     // [columns] or null
  const Bf16* residual = nullptr;  // as in StackedLinearArgs
};

// INTERNAL: CUDA refused the launch.
absl::Status LaunchGeneralProduct(const GeneralProduct& product, const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_GENERAL_PRODUCT_H_
