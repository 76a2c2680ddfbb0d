// The balanced tree over the pack sums of a weight gradient, in a thread block that computes a
// tile's pack sums one after the other. A sum waits for its neighbour in the tree: on the chip if
// there is room besides the tile, otherwise in memory.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_PENDING_SUMS_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_PENDING_SUMS_CUH_

#include "kernels/cuda/sm90/linear/tile.cuh"

namespace isobit::cuda::tile {

// For a tile of 128 rows and so many columns: how many of the tree's lowest levels keep their
// waiting sums in registers, and how many of the next ones in shared memory. All others use memory.
constexpr int LevelsInRegisters(int columns) { return columns <= 128 ? 2 : columns <= 192 ? 1 : 0; }
constexpr int LevelsInShared(int columns) { return columns <= 128 ? 1 : 0; }
constexpr int LevelsOnChip(int columns) {
  return LevelsInRegisters(columns) + LevelsInShared(columns);
}

// One thread's pending sums: for each level as many as it has accumulators.
template <int kValues>
struct PendingSums {
  static constexpr int kColumns = 2 * kValues;
  static constexpr int kInRegisters = LevelsInRegisters(kColumns);
  static constexpr int kOnChip = LevelsOnChip(kColumns);
  static constexpr int kSharedBytes =
      LevelsInShared(kColumns) * 128 * kColumns * static_cast<int>(sizeof(float));
  static constexpr int64_t kLevelWords = 128 * kColumns / 4;  // of a thread block, in memory
  static constexpr int kBatch = kValues % 48 == 0 ? 12 : 8;   // words read from memory at once
  static_assert(kValues / 4 % kBatch == 0);

  // In memory and in shared memory, a sum is in 16-byte words that no other thread uses.
  float4* memory;   // this thread's first word of the first level
  uint32_t shared;  // this thread's first word
  float kept[kInRegisters > 0 ? kInRegisters : 1][kInRegisters > 0 ? kValues : 1];

  // `levels`: the number of levels that use memory.
  __device__ __forceinline__ PendingSums(float4* of_all, int levels, uint32_t of_block,
                                         int consumer)
      : memory(of_all + blockIdx.x * levels * kLevelWords + consumer * (kLevelWords / 2) +
               threadIdx.x % 128),
        shared(of_block + consumer * (kSharedBytes / 2) + threadIdx.x % 128 * 16) {}

  // Adds the sum of pack `number` of `packs`, a power of two. After the last pack `sums` is the sum
  // of all packs; before that its values have no meaning. Sums are added in `kept`, because the
  // compiler would copy the registers that products write.
  __device__ __forceinline__ void Combine(int number, int packs, float (&sums)[kValues]) {
    const bool last = number + 1 == packs;
    if constexpr (kInRegisters == 0) {
      CombineInMemory(number, last, sums);
    } else if (number % 2 == 0) {
      if (!last) CopySums(kept[0], sums);
    } else {
      AddSums(kept[0], sums);
      if constexpr (kInRegisters == 1) {
        CombineInMemory(number, last, kept[0]);
      } else {
        CombinePair(number, last);
      }
      if (last) CopySums(sums, kept[kInRegisters - 1]);
    }
  }

 private:
  // Adds the sum of two packs, kept[0]; `number` is the second of them.
  __device__ __forceinline__ void CombinePair(int number, bool last) {
    if ((number >> 1 & 1) == 0) return CopySums(kept[1], kept[0]);
    AddSums(kept[1], kept[0]);
    if ((number >> 2 & 1) != 0) {
      AddSaved<0, kValues>(kept[1], shared);
      CombineInMemory(number, last, kept[1]);
    } else if (!last) {
      SaveSums<0, kValues>(shared, kept[1]);
    }
  }
  // Adds the sum of 2^kOnChip packs; `number` is the last of them.
  __device__ __forceinline__ void CombineInMemory(int number, bool last, float (&sums)[kValues]) {
    int level = kOnChip;
#pragma unroll 1
    for (; (number >> level & 1) != 0; ++level) Add(level - kOnChip, sums);
    if (!last) Save(level - kOnChip, sums);
  }

  __device__ __forceinline__ void Save(int level, const float (&sums)[kValues]) const {
    float4* const to = memory + level * kLevelWords;
#pragma unroll
    for (int i = 0; i < kValues; i += 4) {
      __stcg(to + i / 4 * 128, make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]));
    }
  }
  __device__ __forceinline__ void Add(int level, float (&sums)[kValues]) const {
    const float4* const from = memory + level * kLevelWords;
#pragma unroll
    for (int first = 0; first < kValues / 4; first += kBatch) {
      float4 words[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) words[i] = __ldcg(from + (first + i) * 128);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        float* const sum = &sums[4 * (first + i)];
        AddInPlace(sum[0], words[i].x);
        AddInPlace(sum[1], words[i].y);
        AddInPlace(sum[2], words[i].z);
        AddInPlace(sum[3], words[i].w);
      }
    }
  }
};

}  // namespace isobit::cuda::tile

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_PENDING_SUMS_CUH_
