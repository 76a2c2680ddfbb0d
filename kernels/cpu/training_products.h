// The products of training on row-major operands: linear layers, and the gradients of their inputs
// and weights. Each call packs one operand into panels; all three then are SegmentedProducts.
#ifndef ISOBIT_KERNELS_CPU_TRAINING_PRODUCTS_H_
#define ISOBIT_KERNELS_CPU_TRAINING_PRODUCTS_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/cpu/mma_panel.h"
#include "kernels/cpu/row_kernels.h"
#include "kernels/cpu/segmented_product.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/ops/linear.h"

namespace isobit::cpu {

// The segments of a K: segment i is elements [from[i], from[i + 1]). With each padded to whole k16
// steps, it has columns [bounds[i], bounds[i + 1]).
struct PaddedSegments {
  explicit PaddedSegments(absl::Span<const int64_t> from);

  int64_t count() const { return static_cast<int64_t>(from.size()) - 1; }
  int64_t length(int64_t i) const {
    return from[static_cast<size_t>(i) + 1] - from[static_cast<size_t>(i)];
  }
  int64_t padded_k() const { return bounds.back(); }

  absl::Span<const int64_t> from;
  std::vector<int64_t> bounds;
};

class TrainingProducts {
 public:
  TrainingProducts(MmaPanelsFn mma, const RowKernels& rows, ThreadPool& pool);

  void StackedLinear(const StackedLinearArgs& a);
  void InputGradient(const InputGradientArgs& a);
  void WeightGradient(const WeightGradientArgs& a);

 private:
  // Fill panels_ and ranges_. PackColumns: output feature i is columns[i], whose K is contiguous.
  // PackRows: element k of output feature i is rows[k][i], i < n.
  void PackColumns(const std::vector<const Bf16*>& columns, const PaddedSegments& k);
  void PackRows(const std::vector<const Bf16*>& rows, int64_t n, const PaddedSegments& k);
  void ResizePanels(int64_t n, const PaddedSegments& k);
  Bf16* PanelSegment(int64_t panel, int64_t segment, const PaddedSegments& k);
  void ScanSegment(int64_t panel, int64_t segment, const PaddedSegments& k);
  // x [m, K] with padded segments: x itself if nothing needs padding.
  void SetRows(const Bf16* x, int64_t ldx, int64_t m, const PaddedSegments& k,
               SegmentedProduct* product);
  // x_ = columns [first, first + count) of dy, as rows with padded segments.
  void TransposeRows(const Bf16* dy, int64_t lddy, int64_t first, int64_t count,
                     const PaddedSegments& k);
  SegmentedProduct ProductOf(int64_t n, const PaddedSegments& k) const;

  const RowKernels& rows_;
  ThreadPool& pool_;
  SegmentedProductOp product_;
  int64_t num_panels_ = 0;
  std::vector<Bf16> panels_;           // [num_panels_][padded_k][32]
  std::vector<ExponentRange> ranges_;  // [segments][num_panels_]
  std::vector<Bf16> x_;                // rows with padded segments
  std::vector<float> sums_;            // [m, n] before AddResidual
};

}  // namespace isobit::cpu

#endif  // ISOBIT_KERNELS_CPU_TRAINING_PRODUCTS_H_
