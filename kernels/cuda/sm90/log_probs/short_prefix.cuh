// A threshold for logits: all tokens that a filter can keep are at
// or above it, and hardly any others. It is cheap to find, and
// usually so few tokens are above it that one block can sort them.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LOG_PROBS_SHORT_PREFIX_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_LOG_PROBS_SHORT_PREFIX_CUH_

#include <cstdint>

#include "kernels/cuda/sm90/log_probs/row_order.cuh"

namespace isobit::cuda {

// A logit `distance` below row_max, or slightly further below, to be safe against rounding.
__device__ __forceinline__ float Below(float row_max, float distance) {
  const float margin = contract::Fma(fabsf(row_max), 0x1p-20f, 0x1p-10f);
  return contract::Sub(contract::Sub(row_max, distance), margin);
}

// A threshold that at least `count` tokens reach, because as many of the threads' own maxima reach
// it; -inf if there is none.
__device__ __forceinline__ float ThresholdOfCount(RowCluster& row, float own_max, float row_max,
                                                  int32_t count, OrderScratch& scratch) {
  constexpr float kBinsPerNat = 8.0f;
  ClearBins(scratch);
  const float scaled = contract::Mul(contract::Sub(row_max, own_max), kBinsPerNat);
  if (scaled < kBins) atomicAdd(&scratch.counts[static_cast<uint32_t>(scaled)], 1u);
  JoinBins<false>(row, scratch);
  FindBin(static_cast<uint64_t>(count), scratch);
  const uint32_t bin = scratch.bin;
  return bin == kBins ? kMinusInfinity : Below(row_max, static_cast<float>(bin + 1) / kBinsPerNat);
}

// Raises *threshold as far as possible while at least the mass that top_p keeps stays at or above
// it. Sets it to -inf if it was already too high. Returns the mass of the row: the sum of its
// weights against row_max.
__device__ __forceinline__ uint64_t NarrowToNucleus(RowCluster& row, const VocabRange& range,
                                                    float row_max, float top_p,
                                                    OrderScratch& scratch, float* threshold) {
  // Only tokens between the maximum and the threshold are put into bins.
  const float zone = fminf(contract::Sub(row_max, *threshold), -kLeastDistance);
  const float bins_per_nat = contract::Div(static_cast<float>(kBins), zone);
  row.Sync();
  ClearBins(scratch);
  FractionSum sum;
  ForEachFour(range, [&](int, const Four& four) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float distance = fmaxf(contract::Sub(four.z[j], row_max), kLeastDistance);
      const float weight = WeightAt(distance);
      sum.Add(weight);
      const float scaled = contract::Mul(-distance, bins_per_nat);
      if (!(scaled < static_cast<float>(kBins))) continue;
      AddToBin<true>(scratch, static_cast<uint32_t>(scaled),
                     static_cast<uint64_t>(contract::Mul(weight, 0x1p40f)));
    }
  });
  const uint64_t warp_mass = sum.OfWarp();
  if (threadIdx.x % 32 == 0) scratch.masses[threadIdx.x / 32] = warp_mass;
  SyncRange();
  uint64_t mass = 0;
#pragma unroll
  for (int w = 0; w < kRangeWarps; ++w) mass += scratch.masses[w];
  const uint64_t* words = row.Exchange(mass, scratch);
  mass = 0;
#pragma unroll
  for (int r = 0; r < contract::kLeaves; ++r) mass += words[r];
  JoinBins<true>(row, scratch);
  FindBin(static_cast<uint64_t>(contract::NucleusBound(static_cast<int64_t>(mass), top_p)),
          scratch);
  const uint32_t bin = scratch.bin;
  *threshold = bin == kBins
                   ? kMinusInfinity
                   : Below(row_max, contract::Div(static_cast<float>(bin + 1), bins_per_nat));
  return mass;
}

// Every token that passes min_p reaches this threshold.
__device__ __forceinline__ float ThresholdOfMinP(float row_max, float min_p) {
  return Below(row_max, -contract::Log(min_p));
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_LOG_PROBS_SHORT_PREFIX_CUH_
