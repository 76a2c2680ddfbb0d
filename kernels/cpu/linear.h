// Linear layers: weights packed leaf by leaf into panels, and products with them.
#ifndef ISOBIT_KERNELS_CPU_LINEAR_H_
#define ISOBIT_KERNELS_CPU_LINEAR_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cpu/mma_panel.h"
#include "kernels/cpu/row_kernels.h"
#include "kernels/cpu/segmented_product.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/ops/linear.h"

namespace isobit::cpu {

// The layout of a packed weight. A panel of 32 output features has its leaves one after the other,
// with each leaf's columns padded with +0 to a multiple of 16. After the panels come the exponent
// ranges, [leaf][panel], then one range per whole panel, for segments that are not leaves.
struct PackedLayout {
  explicit PackedLayout(const LinearShape& shape);

  int64_t panels;
  int64_t padded_k;                       // columns of a panel, in all leaves
  int64_t begins[contract::kLeaves + 1];  // leaf l has padded columns [begins[l], begins[l+1])
  size_t ranges_offset;                   // bytes
  size_t bytes;
};

void PackLinear(const LinearShape& shape, const Bf16* w, int64_t ldw, std::byte* packed);

// The segments of K that are summed separately before their sums are combined: leaves, or the
// splits of mode vanilla. Segment i has padded columns [bounds[i], bounds[i+1]).
struct KSegments {
  int count = 0;
  int64_t bounds[contract::kLeaves + 1];
  SegmentSum sum;
  bool are_leaves = true;  // false: use the exponent ranges of whole panels
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
