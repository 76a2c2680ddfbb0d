// The optimizer and the digest of weights (C15).
#include <algorithm>
#include <cstdint>

#include "kernels/contract/gradients.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cpu/context.h"

namespace isobit::cpu {
namespace {

// Elements [begin, end) of a's: a block of noise at a time.
void DitherPart(const DitherArgs& a, int64_t begin, int64_t end) {
  constexpr uint64_t kWidth = contract::kDitherWidth;
  while (begin < end) {
    const uint64_t at = a.first + static_cast<uint64_t>(begin);
    const auto in_block = static_cast<int64_t>(kWidth - at % kWidth);
    const int64_t stop = std::min(end, begin + in_block);
    const contract::PhiloxBlock block = contract::DitherNoise(a.step, a.moment, at / kWidth);
    for (uint64_t i = at; begin < stop; ++begin, ++i) {
      a.out[begin] = contract::DitherBf16(a.x[begin], contract::DitherOf(block, i));
    }
  }
}

}  // namespace

absl::Status Run(const SquareSumsArgs& a, Context& context) {
  context.pool.ParallelFor(a.rows, std::max<int64_t>(kElementGrain / a.columns, 1),
                           [&](int64_t begin, int64_t end, int) {
                             for (int64_t r = begin; r < end; ++r) {
                               a.sums[r] = context.rows.square_tree(a.x + r * a.columns, a.columns);
                             }
                           });
  return absl::OkStatus();
}

absl::Status Run(const TreeSum64Args& a, Context& /*context*/) {
  contract::TreeSum64 tree;
  for (int64_t i = 0; i < a.count; ++i) tree.Push(a.x[i]);
  *a.sum = tree.Total();
  return absl::OkStatus();
}

absl::Status Run(const AdamWArgs& a, Context& context) {
  context.pool.ParallelFor(a.count, kElementGrain, [&](int64_t begin, int64_t end, int) {
    context.rows.adamw(a.step, a.gradient + begin, end - begin, a.parameter + begin, a.m + begin,
                       a.v + begin, a.working != nullptr ? a.working + begin : nullptr);
  });
  return absl::OkStatus();
}

absl::Status Run(const DitherArgs& a, Context& context) {
  context.pool.ParallelFor(a.count, kElementGrain,
                           [&](int64_t begin, int64_t end, int) { DitherPart(a, begin, end); });
  return absl::OkStatus();
}

absl::Status Run(const WeightSumsArgs& a, Context& /*context*/) {
  AddWeightSums(a.from, a.part, a.sums);
  return absl::OkStatus();
}

}  // namespace isobit::cpu
