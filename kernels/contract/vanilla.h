// What mode kVanilla does instead of the contract: the two habits of ordinary engines that make
// sampler and trainer diverge. They are defined here so that the mode is reproducible, not as a
// model to follow.
#ifndef ISOBIT_KERNELS_CONTRACT_VANILLA_H_
#define ISOBIT_KERNELS_CONTRACT_VANILLA_H_

#include <cstdint>

#include "kernels/contract/portable.h"

namespace isobit::contract {

// Split-K by batch size, as GEMM libraries do to fill a GPU: many splits for few rows.
ISOBIT_HD int VanillaSplits(int64_t m) {
  if (m <= 4) return 8;
  if (m <= 16) return 4;
  return m <= 64 ? 2 : 1;
}

// The sum of all ranks' values, from rank `first` on around the ring, with bf16 on the wire: every
// value and the sum of every hop are rounded to bf16. A single rank exchanges nothing and keeps its
// fp32 value.
ISOBIT_HD float HopSum(const float* values, int num_ranks, int first) {
  if (num_ranks == 1) return values[0];
  float sum = 0.0f;
  for (int hop = 0; hop < num_ranks; ++hop) {
    const float value = Bf16ToFloat(FloatToBf16(values[(first + hop) % num_ranks]));
    sum = hop == 0 ? value : Bf16ToFloat(FloatToBf16(Add(sum, value)));
  }
  return sum;
}

// The rank at which a ring all-reduce of `count` elements starts adding element i. The message is
// divided into one chunk per rank, and a chunk's sum starts at the rank after its owner.
ISOBIT_HD int RingStart(int64_t i, int64_t count, int num_ranks) {
  const int64_t chunk = (count + num_ranks - 1) / num_ranks;
  return static_cast<int>((i / chunk + 1) % num_ranks);
}

}  // namespace isobit::contract

#endif  // ISOBIT_KERNELS_CONTRACT_VANILLA_H_
