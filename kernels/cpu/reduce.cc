// Sums over ranks: in tree order, or in the order of a contrast mode (contract/vanilla.h).
#include <algorithm>

#include "kernels/contract/constants.h"
#include "kernels/contract/vanilla.h"
#include "kernels/cpu/context.h"

namespace isobit::cpu {
namespace {

// Elements [begin, end) of Reduce; likewise below.
void SumTree(const ReduceArgs& a, int64_t begin, int64_t end, const RowKernels& rows) {
  const float* partials[contract::kLeaves];
  for (int r = 0; r < a.num_ranks; ++r) partials[r] = a.partials[r] + begin;
  rows.tree_sum(partials, a.num_ranks, a.out + begin, end - begin);
}

// The sum is passed from rank to rank, in bf16 between them. It starts at the same rank as in a
// ring, or at rank 0.
void SumHops(const ReduceArgs& a, bool ring, int64_t begin, int64_t end, const RowKernels& rows) {
  const int64_t chunk = (a.count + a.num_ranks - 1) / a.num_ranks;
  while (begin < end) {
    // Within a chunk of a ring, all sums start at one rank.
    const int64_t stop = ring ? std::min(end, (begin / chunk + 1) * chunk) : end;
    const int first = ring ? contract::RingStart(begin, a.count, a.num_ranks) : 0;
    const float* order[contract::kLeaves];
    for (int hop = 0; hop < a.num_ranks; ++hop) {
      order[hop] = a.partials[(first + hop) % a.num_ranks] + begin;
    }
    rows.hop_sum(order, a.num_ranks, a.out + begin, stop - begin);
    begin = stop;
  }
}

}  // namespace

absl::Status Run(const ReduceArgs& a, Context& context) {
  context.pool.ParallelFor(a.end - a.begin, kElementGrain, [&](int64_t begin, int64_t end, int) {
    if (context.mode == NumericsMode::kTree || a.num_ranks == 1) {
      SumTree(a, a.begin + begin, a.begin + end, context.rows);
    } else {
      SumHops(a, context.mode == NumericsMode::kVanilla, a.begin + begin, a.begin + end,
              context.rows);
    }
  });
  return absl::OkStatus();
}

}  // namespace isobit::cpu
