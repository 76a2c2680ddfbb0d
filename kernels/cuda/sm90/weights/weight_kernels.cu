// The kernels and their launchers.
#include <algorithm>

#include "common/base/round_up.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/sm90/linear/layout.h"
#include "kernels/cuda/sm90/weights/weight_kernels.h"
#include "kernels/ops/weight_sums.h"

namespace isobit::cuda {
namespace {

constexpr int kThreads = 256;
// A few waves of thread blocks; each goes over the values in strides of the whole grid.
constexpr int64_t kMaxBlocks = 132 * 16;

Grid GridFor(int64_t items) {
  return {.blocks = dim3(static_cast<unsigned>(std::min(CeilDiv(items, kThreads), kMaxBlocks))),
          .threads = dim3(kThreads)};
}

__device__ int64_t FirstItem() { return int64_t{blockIdx.x} * kThreads + threadIdx.x; }
__device__ int64_t ItemStride() { return int64_t{gridDim.x} * kThreads; }

// kWidth values of a row at a time.
template <StoredAs kKind, int kWidth>
__global__ void __launch_bounds__(kThreads)
    RoundKernel(const StoredMatrix from, Bf16* to, int64_t to_stride) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const int64_t groups = from.columns / kWidth;
  for (int64_t i = FirstItem(); i < from.rows * groups; i += ItemStride()) {
    const int64_t row = i / groups;
    const int64_t column = i % groups * kWidth;
    const int64_t source = row * from.stride + column;
    Bf16* const out = to + row * to_stride + column;
    if constexpr (kWidth == 1) {
      *out = LoadWeight<kKind>(from.values, source);
    } else {
      static_assert(kWidth == 8);
      alignas(16) Bf16 rounded[kWidth];
      if constexpr (kKind == StoredAs::kF32) {
        const auto* quads =
            reinterpret_cast<const uint4*>(static_cast<const uint32_t*>(from.values) + source);
        for (int q = 0; q < 2; ++q) {
          const uint4 bits = quads[q];
          rounded[4 * q] = RoundedWeight(bits.x);
          rounded[4 * q + 1] = RoundedWeight(bits.y);
          rounded[4 * q + 2] = RoundedWeight(bits.z);
          rounded[4 * q + 3] = RoundedWeight(bits.w);
        }
      } else {
        alignas(16) uint16_t bits[kWidth];
        *reinterpret_cast<uint4*>(bits) =
            *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(from.values) + source);
        for (int v = 0; v < kWidth; ++v) {
          rounded[v] = kKind == StoredAs::kBf16 ? bits[v] : RoundedWeight(WidenedHalf(bits[v]));
        }
      }
      *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(rounded);
    }
  }
}

template <StoredAs kKind>
absl::Status LaunchRound(const StoredMatrix& from, Bf16* to, int64_t to_stride,
                         const Stream& stream) {
  const int64_t size = kKind == StoredAs::kF32 ? 4 : 2;
  const bool wide = from.columns % 8 == 0 && from.stride * size % 16 == 0 && to_stride % 8 == 0 &&
                    reinterpret_cast<uintptr_t>(from.values) % 16 == 0 &&
                    reinterpret_cast<uintptr_t>(to) % 16 == 0;
  const Grid grid = GridFor(from.rows * from.columns / (wide ? 8 : 1));
  return wide ? Launch(RoundKernel<kKind, 8>, grid, stream, from, to, to_stride)
              : Launch(RoundKernel<kKind, 1>, grid, stream, from, to, to_stride);
}

// What 16 bytes of the packed matrix hold: up to eight columns of one row of W, then zeros.
struct Chunk {
  int64_t first;  // of its values in W; any number if there are none
  int64_t count;  // more than 0: values, 8 or more for all; else padding
};

// Of the i-th 16 bytes.
__device__ Chunk ChunkAt(const LinearShape& shape, const LeafBlocks& leaves, int64_t i) {
  const int64_t block = i / (kBlockBytes / 16);
  const int row = static_cast<int>(i / 8 % kTileRows);
  const int chunk = static_cast<int>(i % 8) ^ (row % 8);
  const int in_tile = static_cast<int>(block % leaves.num_blocks());
  int leaf = 0;
  while (in_tile >= leaves.block[leaf + 1]) ++leaf;
  const int64_t column =
      leaves.column[leaf] + (in_tile - leaves.block[leaf]) * kBlockColumns + chunk * 8;
  const int64_t source = SourceRow(shape, block / leaves.num_blocks() * kTileRows + row);
  return {.first = source * shape.k + column,
          .count = source < 0 ? 0 : leaves.column[leaf + 1] - column};
}

// Whether eight values of W at a time are aligned.
bool HasAlignedChunks(const LinearShape& shape, const Bf16* w) {
  bool aligned = shape.k % 8 == 0 && reinterpret_cast<uintptr_t>(w) % 16 == 0;
  for (int l = 0; l < shape.num_leaves; ++l) aligned = aligned && shape.bounds[l] % 8 == 0;
  return aligned;
}

// A thread writes 16 bytes of the packed matrix.
template <bool kAligned>
__global__ void __launch_bounds__(kThreads)
    PackKernel(const __grid_constant__ LinearShape shape, const __grid_constant__ LeafBlocks leaves,
               int64_t chunks, const Bf16* w, uint4* packed) {
  ReleaseSuccessor();
  WaitForPredecessor();
  for (int64_t i = FirstItem(); i < chunks; i += ItemStride()) {
    const Chunk chunk = ChunkAt(shape, leaves, i);
    const Bf16* const from = w + chunk.first;
    alignas(16) Bf16 values[8] = {};
    if (kAligned && chunk.count >= 8) {
      *reinterpret_cast<uint4*>(values) = *reinterpret_cast<const uint4*>(from);
    } else {
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        if (v < chunk.count) values[v] = from[v];
      }
    }
    packed[i] = *reinterpret_cast<const uint4*>(values);
  }
}

// A thread reads 16 bytes of the packed matrix, and writes what they hold of W.
template <bool kAligned>
__global__ void __launch_bounds__(kThreads)
    UnpackKernel(const __grid_constant__ LinearShape shape,
                 const __grid_constant__ LeafBlocks leaves, int64_t chunks, const uint4* packed,
                 Bf16* w) {
  ReleaseSuccessor();
  WaitForPredecessor();
  for (int64_t i = FirstItem(); i < chunks; i += ItemStride()) {
    const Chunk chunk = ChunkAt(shape, leaves, i);
    if (chunk.count <= 0) continue;
    Bf16* const to = w + chunk.first;
    alignas(16) Bf16 values[8];
    *reinterpret_cast<uint4*>(values) = packed[i];
    if (kAligned && chunk.count >= 8) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(values);
    } else {
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        if (v < chunk.count) to[v] = values[v];
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    WidenKernel(const Bf16* from, int64_t count, float* to) {
  ReleaseSuccessor();
  WaitForPredecessor();
  for (int64_t i = FirstItem(); i < count; i += ItemStride()) {
    to[i] = contract::Bf16ToFloat(from[i]);
  }
}

// The four values from `from`, of which `count` exist, as a word of the digest.
template <StoredAs kKind, bool kAligned>
__device__ uint64_t LoadWord(const void* values, int64_t from, int64_t count) {
  uint64_t word = 0;
  if constexpr (kAligned && kKind == StoredAs::kBf16) {
    return *reinterpret_cast<const uint64_t*>(static_cast<const Bf16*>(values) + from);
  } else if constexpr (kAligned && kKind == StoredAs::kF32) {
    const uint4 bits = *reinterpret_cast<const uint4*>(static_cast<const uint32_t*>(values) + from);
    word = RoundedWeight(bits.x);
    word |= uint64_t{RoundedWeight(bits.y)} << 16;
    word |= uint64_t{RoundedWeight(bits.z)} << 32;
    return word | uint64_t{RoundedWeight(bits.w)} << 48;
  } else {
    for (int v = 0; v < 4 && v < count; ++v) {
      word |= uint64_t{LoadWeight<kKind>(values, from + v)} << (16 * v);
    }
    return word;
  }
}

template <StoredAs kKind, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    SumKernel(const StoredMatrix from, const PartOfTensor part, unsigned long long* sums) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const int64_t words = (from.columns + 3) / 4;  // of a row of the part
  uint64_t first = 0;
  uint64_t second = 0;
  uint64_t nonfinite = 0;
  for (int64_t i = FirstItem(); i < from.rows * words; i += ItemStride()) {
    const int64_t row = i / words;
    const int64_t column = i % words * 4;
    const uint64_t word =
        LoadWord<kKind, kAligned>(from.values, row * from.stride + column, from.columns - column);
    AddWeightWord(word, WordIndex(part, row, column), first, second);
    // A thread goes on towards higher places, so that its first is the largest.
    if (nonfinite == 0 && HasNonfinite(word)) nonfinite = NonfinitePlace(word, part, row, column);
  }
  // Integers: the order of additions changes nothing.
  for (int lane = 16; lane > 0; lane /= 2) {
    first += __shfl_down_sync(~0u, first, lane);
    second += __shfl_down_sync(~0u, second, lane);
  }
  if (threadIdx.x % 32 == 0) {
    atomicAdd(sums, static_cast<unsigned long long>(first));
    atomicAdd(sums + 1, static_cast<unsigned long long>(second));
  }
  if (nonfinite != 0) atomicMax(sums + 2, static_cast<unsigned long long>(nonfinite));
}

template <StoredAs kKind>
absl::Status LaunchSum(const StoredMatrix& from, const PartOfTensor& part, uint64_t* sums,
                       const Stream& stream) {
  const size_t word_bytes = kKind == StoredAs::kF32 ? 16 : 8;
  const bool aligned = from.columns % 4 == 0 && from.stride % 4 == 0 &&
                       reinterpret_cast<uintptr_t>(from.values) % word_bytes == 0;
  const Grid grid = GridFor(from.rows * CeilDiv(from.columns, 4));
  auto* const to = reinterpret_cast<unsigned long long*>(sums);
  return aligned ? Launch(SumKernel<kKind, true>, grid, stream, from, part, to)
                 : Launch(SumKernel<kKind, false>, grid, stream, from, part, to);
}

}  // namespace

absl::Status RoundWeights(const StoredMatrix& from, Bf16* to, int64_t to_stride,
                          const Stream& stream) {
  switch (from.stored_as) {
    case StoredAs::kBf16:
      return LaunchRound<StoredAs::kBf16>(from, to, to_stride, stream);
    case StoredAs::kF16:
      return LaunchRound<StoredAs::kF16>(from, to, to_stride, stream);
    case StoredAs::kF32:
      return LaunchRound<StoredAs::kF32>(from, to, to_stride, stream);
  }
  return absl::InternalError("a way to store weights that is none");
}

absl::Status PackLinearOnDevice(const LinearShape& shape, const Bf16* w, std::byte* packed,
                                const Stream& stream) {
  const LeafBlocks leaves = BlocksOf(shape);
  const auto chunks = static_cast<int64_t>(PackedLinearBytes(shape) / 16);
  auto* const to = reinterpret_cast<uint4*>(packed);
  return HasAlignedChunks(shape, w)
             ? Launch(PackKernel<true>, GridFor(chunks), stream, shape, leaves, chunks, w, to)
             : Launch(PackKernel<false>, GridFor(chunks), stream, shape, leaves, chunks, w, to);
}

absl::Status UnpackLinearOnDevice(const LinearWeight& weight, Bf16* w, const Stream& stream) {
  const LinearShape& shape = weight.shape;
  const LeafBlocks leaves = BlocksOf(shape);
  const auto chunks = static_cast<int64_t>(PackedLinearBytes(shape) / 16);
  const auto* const from = reinterpret_cast<const uint4*>(weight.packed);
  return HasAlignedChunks(shape, w)
             ? Launch(UnpackKernel<true>, GridFor(chunks), stream, shape, leaves, chunks, from, w)
             : Launch(UnpackKernel<false>, GridFor(chunks), stream, shape, leaves, chunks, from, w);
}

absl::Status WidenBiases(const Bf16* from, int64_t count, float* to, const Stream& stream) {
  return Launch(WidenKernel, GridFor(count), stream, from, count, to);
}

absl::Status AddWeightSums(const StoredMatrix& from, const PartOfTensor& part, uint64_t* sums,
                           const Stream& stream) {
  switch (from.stored_as) {
    case StoredAs::kBf16:
      return LaunchSum<StoredAs::kBf16>(from, part, sums, stream);
    case StoredAs::kF16:
      return LaunchSum<StoredAs::kF16>(from, part, sums, stream);
    case StoredAs::kF32:
      return LaunchSum<StoredAs::kF32>(from, part, sums, stream);
  }
  return absl::InternalError("a way to store weights that is none");
}

absl::Status Run(const WeightSumsArgs& args, const Stream& stream) {
  return AddWeightSums(args.from, args.part, args.sums, stream);
}

}  // namespace isobit::cuda
