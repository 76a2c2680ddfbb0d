// The product of rows with packed panels whose K is divided into segments: the leaves of a linear
// layer, or the packs of a weight's gradient.
#ifndef ISOBIT_KERNELS_CPU_SEGMENTED_PRODUCT_H_
#define ISOBIT_KERNELS_CPU_SEGMENTED_PRODUCT_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/cpu/mma_panel.h"
#include "kernels/cpu/row_kernels.h"
#include "kernels/cpu/thread_pool.h"

namespace isobit::cpu {

// y[r][n] = the combined chains of x[r] . w[n] over the segments, plus bias. Exactly one output is
// set; it is [m, n], leading dimension ldy.
struct SegmentedProduct {
  const Bf16* x = nullptr;  // [m, padded_k], leading dimension ldx
  int64_t ldx = 0;
  int64_t m = 0;
  const Bf16* panels = nullptr;  // [n / 32, rounded up][padded_k][32]
  int64_t n = 0;
  int64_t padded_k = 0;
  // Segment i has columns [bounds[i], bounds[i + 1]) of K, multiples of 16. It may be empty.
  absl::Span<const int64_t> bounds;
  SegmentSum sum = SegmentSum::kChain;
  // The range of segment i in panel p is ranges[i * range_stride + p].
  const ExponentRange* ranges = nullptr;
  int64_t range_stride = 0;
  const float* bias = nullptr;   // [n] or null
  const float* start = nullptr;  // [m, n], leading dimension ldy: where the chain of the only
                                 // segment starts; null: +0. May be fp32_out
  Bf16* bf16_out = nullptr;
  float* fp32_out = nullptr;
  int64_t ldy = 0;
};

class SegmentedProductOp {
 public:
  SegmentedProductOp(MmaPanelsFn mma, const RowKernels& rows, ThreadPool& pool);

  void Run(const SegmentedProduct& product);

 private:
  struct Block;
  void RunBlock(const SegmentedProduct& product, const Block& block,
                std::vector<float>& sums) const;

  MmaPanelsFn mma_;
  const RowKernels& rows_;
  ThreadPool& pool_;
  std::vector<std::vector<float>> sums_;  // of each worker: the segment sums of a block
};

}  // namespace isobit::cpu

#endif  // ISOBIT_KERNELS_CPU_SEGMENTED_PRODUCT_H_
