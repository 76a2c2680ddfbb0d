// Linear layers: weights packed leaf by leaf into panels, and the product over them.
#ifndef ISOBIT_KERNELS_CPU_LINEAR_H_
#define ISOBIT_KERNELS_CPU_LINEAR_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cpu/mma_panel.h"
#include "kernels/cpu/row_kernels.h"
#include "kernels/cpu/segmented_product.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/ops.h"

namespace isobit::cpu {

// The layout of a packed weight. For each panel of 32 output features its leaves follow each other;
// each leaf's columns are padded with +0 to a multiple of 16. Then come the exponent ranges,
// [leaf][panel], and then one range for each whole panel, for segments that are not leaves.
struct PackedLayout {
  explicit PackedLayout(const LinearShape& shape);

  int64_t panels;
  int64_t padded_k;                       // columns of a panel, all leaves together
  int64_t begins[contract::kLeaves + 1];  // leaf l holds padded columns [begins[l], begins[l+1])
  size_t ranges_offset;                   // bytes
  size_t bytes;
};

void PackLinear(const LinearShape& shape, const Bf16* w, int64_t ldw, std::byte* packed);

// The segments of K that are summed alone before their sums are combined: leaves, or the splits of
// mode vanilla. Segment i holds padded columns [bounds[i], bounds[i+1]).
struct KSegments {
  int count = 0;
  int64_t bounds[contract::kLeaves + 1];
  SegmentSum sum;
  bool are_leaves = true;  // false: the exponent ranges of whole panels apply
};

class LinearOp {
 public:
  LinearOp(MmaPanelsFn mma, const RowKernels& rows, ThreadPool& pool);

  // The segments are the leaves.
  void Run(const LinearArgs& args);
  void Run(const LinearArgs& args, const PackedLayout& layout, const KSegments& segments);

 private:
  SegmentedProductOp product_;
  std::vector<Bf16> padded_x_;  // x with padded leaves, if x cannot be read in place
};

}  // namespace isobit::cpu

#endif  // ISOBIT_KERNELS_CPU_LINEAR_H_
