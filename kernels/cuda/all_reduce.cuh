// The kernels of all_reduce.h. A row is spread over a cluster of blocks, a thread having kChunks
// times four columns ("quads") of it. Rows go round the clusters, the same way on every rank; the
// first cluster only meets the other ranks'.
#ifndef ISOBIT_KERNELS_CUDA_ALL_REDUCE_CUH_
#define ISOBIT_KERNELS_CUDA_ALL_REDUCE_CUH_

#include <cstdint>

#include "kernels/contract/leaf_plan.h"
#include "kernels/contract/row_functions.h"
#include "kernels/contract/vanilla.h"
#include "kernels/cuda/device/barrier.cuh"
#include "kernels/cuda/device/cluster.cuh"
#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/rank_meeting.cuh"
#include "kernels/cuda/device/row_columns.cuh"
#include "kernels/ops.h"

namespace isobit::cuda {

struct AllReduceJob {
  RankGroup group;
  size_t mailbox_bytes;  // two mailboxes follow the RankControl
  const float* partial;  // [norm.rows, norm.hidden]
  RmsNormArgs norm;
  bool hops;    // add in rank order with bf16 between (vanilla.h), not in tree order
  int release;  // XXX 0 top, 1 after wait, 2 end
};

inline constexpr int kQuad = 4;            // columns
inline constexpr int kMaxChunkSums = 128;  // of 32 quads each
inline constexpr uint32_t kEmpty = ~0u;    // a word of a mailbox that nobody has written
inline constexpr uint32_t kAnyNan = 0x7fffffffu;

__device__ __forceinline__ bool Full(uint4 v) {
  return v.x != kEmpty && v.y != kEmpty && v.z != kEmpty && v.w != kEmpty;
}
__device__ __forceinline__ bool Full(uint2 v) { return v.x != kEmpty && v.y != kEmpty; }

// Every NaN as one that is not kEmpty. All of them end as the same bf16.
__device__ __forceinline__ uint32_t Sendable(uint32_t v) {
  return (v & 0x7fffffffu) > 0x7f800000u ? kAnyNan : v;
}

// Four columns of a row, +0 beyond its end. kAligned: the row is whole quads, at multiples of 16
// bytes.
template <bool kAligned>
__device__ __forceinline__ uint4 LoadFloatQuad(const float* x, int64_t left) {
  if constexpr (kAligned) return *reinterpret_cast<const uint4*>(x);
  return {contract::BitsOf(x[0]), left > 1 ? contract::BitsOf(x[1]) : 0u,
          left > 2 ? contract::BitsOf(x[2]) : 0u, left > 3 ? contract::BitsOf(x[3]) : 0u};
}
template <bool kAligned>
__device__ __forceinline__ uint2 LoadBf16Quad(const Bf16* x, int64_t left) {
  if constexpr (kAligned) return *reinterpret_cast<const uint2*>(x);
  const auto at = [&](int i) { return left > i ? static_cast<uint32_t>(x[i]) : 0u; };
  return {at(0) | at(1) << 16, at(2) | at(3) << 16};
}
template <bool kAligned>
__device__ __forceinline__ void StoreBf16Quad(Bf16* x, uint2 v, int64_t left) {
  if constexpr (kAligned) {
    *reinterpret_cast<uint2*>(x) = v;
  } else {
    x[0] = static_cast<Bf16>(v.x);
    if (left > 1) x[1] = static_cast<Bf16>(v.x >> 16);
    if (left > 2) x[2] = static_cast<Bf16>(v.y);
    if (left > 3) x[3] = static_cast<Bf16>(v.y >> 16);
  }
}

// contract::AddResidual of the sum of one column's partials, all before the last rounding.
template <int kRanks>
__device__ __forceinline__ float DeltaOf(const uint32_t (&partials)[kRanks], float bias,
                                         bool hops) {
  float values[kRanks];
#pragma unroll
  for (int r = 0; r < kRanks; ++r) values[r] = contract::FromBits(partials[r]);
  const float sum = hops ? contract::HopSum(values, kRanks, 0) : contract::TreeOf(values, kRanks);
  return contract::Add(sum, bias);
}

// contract::AddResidual of four columns.
template <int kRanks>
__device__ __forceinline__ uint2 AddPartials(uint2 residual, const uint4 (&partials)[kRanks],
                                             float4 bias, bool hops) {
  uint32_t x[kRanks], y[kRanks], z[kRanks], w[kRanks];
#pragma unroll
  for (int r = 0; r < kRanks; ++r) {
    x[r] = partials[r].x, y[r] = partials[r].y, z[r] = partials[r].z, w[r] = partials[r].w;
  }
  const uint32_t low = PackBf16(DeltaOf(x, bias.x, hops), DeltaOf(y, bias.y, hops));
  const uint32_t high = PackBf16(DeltaOf(z, bias.z, hops), DeltaOf(w, bias.w, hops));
  return {PackBf16(contract::Add(LowOf(residual.x), LowOf(low)),
                   contract::Add(HighOf(residual.x), HighOf(low))),
          PackBf16(contract::Add(LowOf(residual.y), LowOf(high)),
                   contract::Add(HighOf(residual.y), HighOf(high)))};
}

// The leaf of the row's tree of squares (C5).
__device__ __forceinline__ float SumOfSquares(uint2 h) {
  static_assert(contract::kNormLeaf == kQuad);
  float leaf = contract::Mul(LowOf(h.x), LowOf(h.x));
  leaf = contract::Fma(HighOf(h.x), HighOf(h.x), leaf);
  leaf = contract::Fma(LowOf(h.y), LowOf(h.y), leaf);
  return contract::Fma(HighOf(h.y), HighOf(h.y), leaf);
}

__device__ __forceinline__ uint32_t NormalisePair(uint32_t x, float inverse_rms, uint32_t weight) {
  const uint32_t unit =
      PackBf16(contract::Mul(LowOf(x), inverse_rms), contract::Mul(HighOf(x), inverse_rms));
  return PackBf16(contract::Mul(LowOf(weight), LowOf(unit)),
                  contract::Mul(HighOf(weight), HighOf(unit)));
}

// A block's part of the rows that its cluster computes.
template <int kRanks, int kChunks, bool kAligned>
class RowPart {
 public:
  // The sums of squares of 32 quads each, over the whole row; two rows' in turn.
  using Sums = float4[2][kMaxChunkSums / 4];

  __device__ RowPart(const AllReduceJob& job, Sums& sums)
      : job_(job),
        sums_(sums),
        cluster_(BlocksOfCluster()),
        first_quad_(static_cast<int>(BlockInCluster() * kChunks * blockDim.x + threadIdx.x)),
        columns_((job.norm.hidden + kQuad - 1) / kQuad * kQuad) {
    for (unsigned i = threadIdx.x; i < 2 * kMaxChunkSums; i += blockDim.x) {
      if (i % kMaxChunkSums >= cluster_ * kChunks * blockDim.x / 32) {
        reinterpret_cast<float*>(sums_)[i] = 0.0f;
      }
    }
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      if (active(j)) weight_[j] = LoadBf16Quad<kAligned>(job_.norm.weight + column(j), left(j));
    }
  }

  __device__ int64_t column(int j) const {
    return int64_t{kQuad} * (first_quad_ + j * static_cast<int>(blockDim.x));
  }
  __device__ bool active(int j) const { return column(j) < job_.norm.hidden; }

  __device__ uint4 Partial(int64_t row, int j) const {
    const uint4 v =
        LoadFloatQuad<kAligned>(job_.partial + row * job_.norm.hidden + column(j), left(j));
    return {Sendable(v.x), Sendable(v.y), Sendable(v.z), Sendable(v.w)};
  }
  __device__ uint2 Residual(int64_t row, int j) const {
    return LoadBf16Quad<kAligned>(job_.norm.residual + row * job_.norm.hidden + column(j), left(j));
  }
  __device__ float4 Bias(int j) const {
    if (job_.norm.bias == nullptr) return {0.0f, 0.0f, 0.0f, 0.0f};
    const uint4 v = LoadFloatQuad<kAligned>(job_.norm.bias + column(j), left(j));
    return {contract::FromBits(v.x), contract::FromBits(v.y), contract::FromBits(v.z),
            contract::FromBits(v.w)};
  }

  // Where rank `to`'s mailbox has this thread's quad of fp32 row `slot`.
  __device__ uint4* FloatSlot(int to, uint32_t number, int64_t slot, int j) const {
    std::byte* const mailbox =
        job_.group.memory[to] + sizeof(RankControl) + (number % 2) * job_.mailbox_bytes;
    return reinterpret_cast<uint4*>(reinterpret_cast<float*>(mailbox) + slot * columns_ +
                                    column(j));
  }
  // Likewise of bf16 row `slot`, which lie behind `before` fp32 rows.
  __device__ uint2* Bf16Slot(int to, uint32_t number, int64_t before, int64_t slot, int j) const {
    std::byte* const mailbox = job_.group.memory[to] + sizeof(RankControl) +
                               (number % 2) * job_.mailbox_bytes +
                               before * columns_ * static_cast<int64_t>(sizeof(float));
    return reinterpret_cast<uint2*>(reinterpret_cast<Bf16*>(mailbox) + slot * columns_ + column(j));
  }

  // Gathers the peers' partials of a row for all chunks, from row slot_of(q) of the own mailbox,
  // and adds them to the residual.
  template <typename SlotOf>
  __device__ void Collect(const Operation& operation, const uint4 (&own)[kChunks],
                          const uint2 (&residual)[kChunks], const SlotOf& slot_of,
                          uint2 (&h)[kChunks]) const {
    const int rank = job_.group.rank;
    uint4 partials[kChunks][kRanks];
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
#pragma unroll
      for (int q = 0; q < kRanks; ++q) {
        partials[j][q] = q == rank || !active(j) ? own[j] : uint4{kEmpty, kEmpty, kEmpty, kEmpty};
      }
    }
    Wait wait(operation);
    while (true) {
      bool full = true;
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
#pragma unroll
        for (int q = 0; q < kRanks; ++q) {  // asks for what is missing
          if (Full(partials[j][q])) continue;
          partials[j][q] = LoadRelaxed(FloatSlot(rank, operation.number(), slot_of(q), j));
        }
      }
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
#pragma unroll
        for (int q = 0; q < kRanks; ++q) full = full && Full(partials[j][q]);
      }
      if (full || !wait.Again()) break;
    }
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      if (active(j)) h[j] = AddPartials(residual[j], partials[j], Bias(j), job_.hops);
    }
  }

  // Stores the row's residual h and its RMSNorm. `turn`: 0 and 1 in turn.
  __device__ void Finish(int64_t row, const uint2 (&h)[kChunks], int turn) {
    const int64_t offset = row * job_.norm.hidden;
    const unsigned lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      if (active(j))
        StoreBf16Quad<kAligned>(job_.norm.residual + offset + column(j), h[j], left(j));
      const float sum = TreeOfLanes(active(j) ? SumOfSquares(h[j]) : 0.0f);
      float* const to = reinterpret_cast<float*>(sums_[turn]) + column(j) / (kQuad * 32);
      if (cluster_ == 1) {
        if (lane == 0) *to = sum;
      } else if (lane < cluster_) {
        StoreToBlock(AddressInBlock(SharedAddress(to), lane), sum);
      }
    }
    if (cluster_ == 1) {
      __syncthreads();
    } else {
      ArriveCluster();
      WaitCluster();
    }
    const float4 four = sums_[turn][lane];
    const float total =
        TreeOfLanes(contract::Add(contract::Add(four.x, four.y), contract::Add(four.z, four.w)));
    const float inverse_rms = contract::InverseRms(total, job_.norm.hidden, job_.norm.eps);
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      if (!active(j)) continue;
      StoreBf16Quad<kAligned>(job_.norm.out + offset + column(j),
                              {NormalisePair(h[j].x, inverse_rms, weight_[j].x),
                               NormalisePair(h[j].y, inverse_rms, weight_[j].y)},
                              left(j));
    }
  }

 private:
  __device__ int64_t left(int j) const { return job_.norm.hidden - column(j); }

  const AllReduceJob& job_;
  Sums& sums_;
  const unsigned cluster_;
  const int first_quad_;
  const int64_t columns_;  // of a mailbox's row
  uint2 weight_[kChunks];
};

// The part of the kernel of every operation that meets the peers, off the way of the data.
__device__ __forceinline__ void MeetPeers(const RankGroup& group) {
  WaitForPredecessor();
  Operation operation(group);
  operation.TakeTicket();
  if (blockIdx.x == 0) operation.Meet();
  ReleaseSuccessor();
  operation.End();
}

inline __global__ void __launch_bounds__(32)
    BarrierKernel(const __grid_constant__ RankGroup group) {
  MeetPeers(group);
}

template <int kRanks, int kChunks, bool kAligned>
__global__ void __launch_bounds__(1024) OneShotKernel(const __grid_constant__ AllReduceJob job) {
  __shared__ typename RowPart<kRanks, kChunks, kAligned>::Sums sums;
  const unsigned cluster = BlocksOfCluster();
  if (blockIdx.x < cluster) return MeetPeers(job.group);
  if (job.release == 0) ReleaseSuccessor();
  ArriveCluster();
  RowPart<kRanks, kChunks, kAligned> part(job, sums);
  WaitForPredecessor();
  if (job.release == 1) ReleaseSuccessor();
  Operation operation(job.group);
  const int rank = job.group.rank;
  const int64_t rows = job.norm.rows;
  const int64_t stride = gridDim.x / cluster - 1;
  const int64_t first = blockIdx.x / cluster - 1;
  int turn = 0;
  for (int64_t row = first; row < rows; row += stride, turn ^= 1) {
    uint4 own[kChunks] = {};
    uint2 residual[kChunks] = {};
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      if (!part.active(j)) continue;
      own[j] = part.Partial(row, j);
      residual[j] = part.Residual(row, j);
#pragma unroll
      for (int d = 1; d < kRanks; ++d) {
        StoreRelaxed(part.FloatSlot((rank + d) % kRanks, operation.number(), rank * rows + row, j),
                     own[j]);
      }
    }
    if (row == first) {
      operation.TakeTicket();
      WaitCluster();
    }
    uint2 h[kChunks] = {};
    part.Collect(
        operation, own, residual, [&](int q) { return q * rows + row; }, h);
    part.Finish(row, h, turn);
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      if (!part.active(j)) continue;
#pragma unroll
      for (int d = 1; d < kRanks; ++d) {
        StoreRelaxed(part.FloatSlot(rank, operation.number(), (rank + d) % kRanks * rows + row, j),
                     {kEmpty, kEmpty, kEmpty, kEmpty});
      }
    }
  }
  if (job.release == 2) ReleaseSuccessor();
  operation.End();
}

// Row r belongs to rank r % kRanks. Its mailbox has the peers' partials of its rows, rank after
// rank, then a bf16 row of the new residual for every row.
template <int kRanks, int kChunks, bool kAligned>
__global__ void __launch_bounds__(1024) TwoShotKernel(const __grid_constant__ AllReduceJob job) {
  __shared__ typename RowPart<kRanks, kChunks, kAligned>::Sums sums;
  const unsigned cluster = BlocksOfCluster();
  if (blockIdx.x < cluster) return MeetPeers(job.group);
  if (job.release == 0) ReleaseSuccessor();
  ArriveCluster();
  RowPart<kRanks, kChunks, kAligned> part(job, sums);
  WaitForPredecessor();
  if (job.release == 1) ReleaseSuccessor();
  Operation operation(job.group);
  const int rank = job.group.rank;
  const int64_t rows = job.norm.rows;
  const int64_t owned = (rows + kRanks - 1) / kRanks;
  const int64_t stride = gridDim.x / cluster - 1;
  const int64_t first = blockIdx.x / cluster - 1;
  const auto give = [&](int64_t row) {
    const int owner = static_cast<int>(row % kRanks);
    if (row >= rows || owner == rank) return;
    uint4 own[kChunks];
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      if (part.active(j)) own[j] = part.Partial(row, j);
    }
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      if (!part.active(j)) continue;
      StoreRelaxed(part.FloatSlot(owner, operation.number(), rank * owned + row / kRanks, j),
                   own[j]);
    }
  };
  give(first);
  operation.TakeTicket();
  WaitCluster();
  int turn = 0;
  for (int64_t row = first; row < rows; row += stride, turn ^= 1) {
    give(row + stride);
    uint2 h[kChunks] = {};
    if (row % kRanks == rank) {
      uint4 own[kChunks] = {};
      uint2 residual[kChunks] = {};
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        if (!part.active(j)) continue;
        own[j] = part.Partial(row, j);
        residual[j] = part.Residual(row, j);
      }
      const auto slot_of = [&](int q) { return q * owned + row / kRanks; };
      part.Collect(operation, own, residual, slot_of, h);
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        if (!part.active(j)) continue;
#pragma unroll
        for (int d = 1; d < kRanks; ++d) {
          StoreRelaxed(
              part.Bf16Slot((rank + d) % kRanks, operation.number(), kRanks * owned, row, j), h[j]);
        }
#pragma unroll
        for (int d = 1; d < kRanks; ++d) {
          StoreRelaxed(part.FloatSlot(rank, operation.number(), slot_of((rank + d) % kRanks), j),
                       {kEmpty, kEmpty, kEmpty, kEmpty});
        }
      }
    } else {
      const auto slot = [&](int j) {
        return part.Bf16Slot(rank, operation.number(), kRanks * owned, row, j);
      };
      Wait wait(operation);
      while (true) {
        bool full = true;
#pragma unroll
        for (int j = 0; j < kChunks; ++j) {
          if (!part.active(j)) continue;
          h[j] = LoadRelaxed(slot(j));
          full = full && Full(h[j]);
        }
        if (full || !wait.Again()) break;
      }
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        if (part.active(j)) StoreRelaxed(slot(j), {kEmpty, kEmpty});
      }
    }
    part.Finish(row, h, turn);
  }
  if (job.release == 2) ReleaseSuccessor();
  operation.End();
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_ALL_REDUCE_CUH_
