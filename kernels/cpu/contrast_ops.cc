// See contrast_ops.h.
#include "kernels/cpu/contrast_ops.h"

#include <algorithm>

#include "kernels/contract/constants.h"
#include "kernels/contract/vanilla.h"

namespace isobit::cpu {

void BatchInvariantOps::ReduceElements(const ReduceArgs& a, int64_t begin, int64_t end) {
  if (a.num_ranks == 1) return TreeOps::ReduceElements(a, begin, end);
  while (begin < end) {
    const int64_t stop = std::min(end, EndOfRun(a, begin));
    const int first = FirstRank(a, begin);
    const float* order[contract::kLeaves];
    for (int hop = 0; hop < a.num_ranks; ++hop) {
      order[hop] = a.partials[(first + hop) % a.num_ranks] + begin;
    }
    rows().hop_sum(order, a.num_ranks, a.out + begin, stop - begin);
    begin = stop;
  }
}

int VanillaOps::FirstRank(const ReduceArgs& a, int64_t i) const {
  return contract::RingStart(i, a.count, a.num_ranks);
}

int64_t VanillaOps::EndOfRun(const ReduceArgs& a, int64_t i) const {
  const int64_t chunk = (a.count + a.num_ranks - 1) / a.num_ranks;
  return (i / chunk + 1) * chunk;
}

absl::Status VanillaOps::Product(const LinearArgs& a) {
  const PackedLayout layout(a.weight.shape);
  const int64_t steps = layout.padded_k / contract::kMmaK;
  KSegments splits;
  splits.count = contract::VanillaSplits(a.m);
  splits.sum = SegmentSum::kZeroChain;
  splits.are_leaves = false;
  for (int i = 0; i <= splits.count; ++i) {
    splits.bounds[i] = i * steps / splits.count * contract::kMmaK;
  }
  linear().Run(a, layout, splits);
  return absl::OkStatus();
}

}  // namespace isobit::cpu
