// The epilogue of the tile kernels, from a wgmma fragment of finished sums to y: bias, rounding,
// SwiGLU, and stores of whole sectors.
//
// A fragment is 64 rows by G octets over a warpgroup; an octet is 8 packed columns. The octets of a
// gated weight alternate between gates and ups.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_TILE_OUTPUT_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_TILE_OUTPUT_CUH_

#include <cstdint>

#include "kernels/contract/portable.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cuda/common/device/mma_sync.cuh"
#include "kernels/cuda/common/device/swiglu.cuh"
#include "kernels/cuda/sm90/linear/output.cuh"
#include "kernels/ops/linear.h"

namespace isobit::cuda::tile {

// Where an octet's columns of y begin, and how many columns y has from there on: 8 or more, fewer
// at the edge, or none.
struct OctetColumns {
  int32_t column;
  int32_t count;
};
__device__ __forceinline__ OctetColumns ColumnsOf(const LinearTarget& target, int octet) {
  if (!target.gated) return {8 * octet, target.n - 8 * octet};
  const int column = 8 * (octet / 2);
  return {column + octet % 2 * target.ups, target.n - column};
}

// Whether 16 bytes can be stored at once to y's rows, from every eighth column on.
inline bool TakesVectors(const LinearArgs& args, const LinearTarget& target) {
  const int elements = OutputOf(args) == LinearOutput::kFp32 ? 4 : 8;
  return reinterpret_cast<uintptr_t>(target.y) % 16 == 0 && target.ldy % elements == 0;
}

struct TileOutput {
  LinearOutput kind = LinearOutput::kBf16;
  bool vectors = false;
  LinearTarget target;
};

// The two rows of y to which a thread stores, from its fragment's first column on.
template <typename T>
struct OutputRows {
  T* upper;
  T* lower;  // 8 rows below
  bool has_upper;
  bool has_lower;

  __device__ __forceinline__ OutputRows(const TileOutput& out, int row, int column)
      : upper(static_cast<T*>(out.target.y) + row * out.target.ldy + column),
        lower(upper + 8 * out.target.ldy),
        has_upper(row < out.target.m),
        has_lower(row + 8 < out.target.m) {}

  // kWhole: stores both vectors whole. Otherwise stores the first `count` elements of each, by the
  // widest stores that y's alignment permits.
  template <bool kWhole, class Vector>
  __device__ __forceinline__ void Store(int at, int count, const Vector& high, const Vector& low) {
    if constexpr (kWhole) {
      if (has_upper) *reinterpret_cast<Vector*>(upper + at) = high;
      if (has_lower) *reinterpret_cast<Vector*>(lower + at) = low;
    } else {
      StoreEdge(upper + at, has_upper ? count : 0, high);
      StoreEdge(lower + at, has_lower ? count : 0, low);
    }
  }

 private:
  template <class Vector>
  static __device__ __forceinline__ void StoreEdge(T* y, int count, const Vector& vector) {
    constexpr int kElements = sizeof(Vector) / sizeof(T);
    if (count >= kElements && reinterpret_cast<uintptr_t>(y) % sizeof(Vector) == 0) {
      *reinterpret_cast<Vector*>(y) = vector;
      return;
    }
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (i < count) y[i] = Element<kElements>(vector, i);
    }
  }
  template <int kElements, class Vector>
  static __device__ __forceinline__ T Element(const Vector& vector, int i) {
    if constexpr (kElements == 4) {
      return i == 0 ? vector.x : i == 1 ? vector.y : i == 2 ? vector.z : vector.w;
    } else {
      const uint32_t pair = i < 2 ? vector.x : i < 4 ? vector.y : i < 6 ? vector.z : vector.w;
      return static_cast<T>(i % 2 == 0 ? pair : pair >> 16);
    }
  }
};

// OutputRows for a y whose columns are whole vectors: stores whole vectors, and none beyond the
// last column.
template <typename T>
struct ClippedRows : OutputRows<T> {
  int32_t left;  // columns of y from the first one on

  __device__ __forceinline__ ClippedRows(const TileOutput& out, int row, int column)
      : OutputRows<T>(out, row, column), left(out.target.n - column) {}

  template <bool kWhole, class Vector>
  __device__ __forceinline__ void Store(int at, int count, const Vector& high, const Vector& low) {
    static_assert(kWhole);
    if (at < left) OutputRows<T>::template Store<true>(at, count, high, low);
  }
};

template <int kOctets, int kValues>
__device__ __forceinline__ void AddBias(const TileOutput& out, float (&sums)[kValues], int octet) {
  const int pair = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < kOctets; ++i) {
    const OctetColumns at = ColumnsOf(out.target, octet + i);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (pair + e >= at.count) continue;
      const float bias = out.target.bias[at.column + pair + e];
      sums[4 * i + e] = contract::Add(sums[4 * i + e], bias);
      sums[4 * i + 2 + e] = contract::Add(sums[4 * i + 2 + e], bias);
    }
  }
}

// Four neighbouring columns of a thread's two rows.
struct RowQuads {
  float4 high, low;
};

// From two octets, even lanes get quads of the first and odd lanes of the second, so that four
// lanes have 64 bytes of a row. For a last octet without a partner, both get the same.
template <int kOctets, int kValues>
__device__ __forceinline__ RowQuads QuadsOf(const float (&sums)[kValues], int i) {
  const bool odd = threadIdx.x % 2 == 1;
  const float* const first = &sums[4 * i];
  const float* const second = &sums[i + 1 < kOctets ? 4 * i + 4 : 4 * i];
  float got[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    got[e] = __shfl_xor_sync(0xffffffffu, odd ? first[e] : second[e], 1);
  }
  return {odd ? make_float4(got[0], got[1], second[0], second[1])
              : make_float4(first[0], first[1], got[0], got[1]),
          odd ? make_float4(got[2], got[3], second[2], second[3])
              : make_float4(first[2], first[3], got[2], got[3])};
}

template <int kOctets, bool kWhole, class Rows = OutputRows<float>, int kValues>
__device__ __forceinline__ void StoreFp32(const TileOutput& out, const float (&sums)[kValues],
                                          int row, int octet) {
  const int lane = threadIdx.x % 4;
  const int column = lane / 2 * 4;
  Rows rows(out, row, kWhole ? 8 * (octet + lane % 2) + column : 0);
#pragma unroll
  for (int i = 0; i < kOctets; i += 2) {
    const bool paired = i + 1 < kOctets;
    const auto [high, low] = QuadsOf<kOctets>(sums, i);
    if constexpr (kWhole) {
      rows.template Store<true>(paired ? 8 * i : 8 * (i - lane % 2), 4, high, low);
    } else {
      const OctetColumns at = ColumnsOf(out.target, octet + i + (paired ? lane % 2 : 0));
      rows.template Store<false>(at.column + column, at.count - column, high, low);
    }
  }
}

// In pairs of threads with neighbouring rows (lane bit 2), which both have two quads of their rows:
// returns the even row's (top) and the odd row's (bottom) quad that this thread sends. The lower
// thread gets `first` of both rows, the upper thread `second`.
struct NeighbourQuads {
  float4 top, bottom;
};
__device__ __forceinline__ NeighbourQuads SwapRows(float4 first, float4 second) {
  const bool upper = (threadIdx.x & 4) != 0;
  const float4 mine = upper ? second : first;
  const float4 sent = upper ? first : second;
  const float4 got = {
      __shfl_xor_sync(0xffffffffu, sent.x, 4), __shfl_xor_sync(0xffffffffu, sent.y, 4),
      __shfl_xor_sync(0xffffffffu, sent.z, 4), __shfl_xor_sync(0xffffffffu, sent.w, 4)};
  return {upper ? got : mine, upper ? mine : got};
}

// Pushes the sums to the ranks that add them. From four octets, eight lanes send 128 bytes of a row
// at once: NVLink carries them in fewer packets than two times 64 bytes.
template <int kOctets, int kValues>
__device__ __forceinline__ void PushSums(const LinearTarget& target, const float (&sums)[kValues],
                                         int row, int octet, uint32_t operation) {
  const PartialPush& push = target.push;
  const int lane = threadIdx.x % 4;
  const int upper = threadIdx.x / 4 % 2;
  const int even_row = row - upper;  // tiles begin at even rows
  const int eight_rows = EightRowsOf(push);
  const int sends = push.two_shots ? 1 : push.group.size;
#pragma unroll 1
  for (int d = 1; d <= sends; ++d) {
    const int to = (push.group.rank + d) % push.group.size;
    const auto at = [&](int of_row) {
      return push.two_shots ? OwnersRow(push, operation, of_row)
                            : PushedRow(push, operation, to, of_row);
    };
    uint4* const top = at(even_row);
    uint4* const bottom = at(even_row + 1);
    const auto store = [&](bool odd_row, bool low, int quad, float4 sum) {
      if (quad >= push.quads || even_row + odd_row + 8 * low >= target.m) return;
      StoreRelaxed((odd_row ? bottom : top) + (low ? eight_rows : 0) + OffsetOf(push, quad),
                   WordsOf(sum));
    };
#pragma unroll
    for (int i = 0; i < kOctets / 4 * 4; i += 4) {
      const RowQuads first = QuadsOf<kOctets>(sums, i);
      const RowQuads second = QuadsOf<kOctets>(sums, i + 2);
      const int quad = 2 * (octet + i + 2 * upper + lane % 2) + lane / 2;
      const NeighbourQuads high = SwapRows(first.high, second.high);
      const NeighbourQuads low = SwapRows(first.low, second.low);
      store(false, false, quad, high.top);
      store(true, false, quad, high.bottom);
      store(false, true, quad, low.top);
      store(true, true, quad, low.bottom);
    }
#pragma unroll
    for (int i = kOctets / 4 * 4; i < kOctets; i += 2) {
      const bool paired = i + 1 < kOctets;
      const RowQuads quads = QuadsOf<kOctets>(sums, i);
      if (!paired && lane % 2 == 1) continue;
      const int quad = 2 * (octet + i + lane % 2) + lane / 2;
      store(upper != 0, false, quad, quads.high);
      store(upper != 0, true, quad, quads.low);
    }
  }
}

// kStep octets of sums make one octet of y: 1, or 2 for gates and their ups. The octets go to a
// Rows: an OutputRows<Bf16>, or a class with the same Store.
template <int kOctets, int kStep, bool kWhole, class Rows = OutputRows<Bf16>, class Output,
          int kValues>
__device__ __forceinline__ void StoreBf16(const Output& out, const float (&sums)[kValues], int row,
                                          int octet) {
  constexpr int kOutputs = kOctets / kStep;
  const int lane = threadIdx.x % 4;
  Rows rows(out, row, kWhole ? 8 * (octet / kStep + lane) : 0);
#pragma unroll
  for (int i = 0; i < kOutputs; i += 4) {
    Columns high[kStep] = {}, low[kStep] = {};
#pragma unroll
    for (int t = 0; t < 4 && i + t < kOutputs; ++t) {
#pragma unroll
      for (int pair = 0; pair < kStep; ++pair) {
        const float* const values = &sums[4 * ((i + t) * kStep + pair)];
        high[pair].pairs[t] = PackBf16(values[0], values[1]);
        low[pair].pairs[t] = PackBf16(values[2], values[3]);
      }
    }
    Columns upper = kStep == 1 ? high[0] : SwiGluColumns(high[0], high[kStep - 1]);
    Columns lower = kStep == 1 ? low[0] : SwiGluColumns(low[0], low[kStep - 1]);
    Transpose4x4<1>(upper.pairs, threadIdx.x & 1, threadIdx.x & 2);
    Transpose4x4<1>(lower.pairs, threadIdx.x & 1, threadIdx.x & 2);
    const uint4 upper_octet =
        make_uint4(upper.pairs[0], upper.pairs[1], upper.pairs[2], upper.pairs[3]);
    const uint4 lower_octet =
        make_uint4(lower.pairs[0], lower.pairs[1], lower.pairs[2], lower.pairs[3]);
    if (i + lane < kOutputs) {
      if constexpr (kWhole) {
        rows.template Store<true>(8 * i, 8, upper_octet, lower_octet);
      } else {
        const OctetColumns at = ColumnsOf(out.target, octet + kStep * (i + lane));
        rows.template Store<false>(at.column, at.count, upper_octet, lower_octet);
      }
    }
  }
}

// Stores the first 4 kOctets of `sums`, and may change them. This thread's rows are `row` and row +
// 8. `octet`: the index of the fragment's first octet; an even number if the weight is gated.
template <int kOctets, int kValues>
__device__ __forceinline__ void StoreSums(const TileOutput& out, float (&sums)[kValues], int row,
                                          int octet, uint32_t operation) {
  if (out.target.bias != nullptr) AddBias<kOctets>(out, sums, octet);
  if (out.target.pushes) return PushSums<kOctets>(out.target, sums, row, octet, operation);
  const bool swiglu = out.kind == LinearOutput::kSwiGlu;
  const int end = 8 * (octet + kOctets) / (swiglu ? 2 : 1);  // of the columns, if they are adjacent
  const bool whole = out.vectors && swiglu == out.target.gated && end <= out.target.n;
  if (out.kind == LinearOutput::kFp32) {
    if (whole) {
      StoreFp32<kOctets, true>(out, sums, row, octet);
    } else {
      StoreFp32<kOctets, false>(out, sums, row, octet);
    }
  } else if (out.kind == LinearOutput::kBf16) {
    if (whole) {
      StoreBf16<kOctets, 1, true>(out, sums, row, octet);
    } else {
      StoreBf16<kOctets, 1, false>(out, sums, row, octet);
    }
  } else if constexpr (kOctets % 2 == 0) {
    if (whole) {
      StoreBf16<kOctets, 2, true>(out, sums, row, octet);
    } else {
      StoreBf16<kOctets, 2, false>(out, sums, row, octet);
    }
  }
}

}  // namespace isobit::cuda::tile

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_TILE_OUTPUT_CUH_
