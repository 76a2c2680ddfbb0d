// The kernels of all_reduce.h. A row is distributed over a cluster of blocks; each thread has
// kChunks times four columns of it, called quads. Clusters take the rows in turn, in the same way
// on every rank. The first cluster takes no rows: it only runs the barrier with the other ranks.
#ifndef ISOBIT_KERNELS_CUDA_SM90_COLLECTIVE_ALL_REDUCE_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_COLLECTIVE_ALL_REDUCE_CUH_

#include <cstdint>

#include "kernels/contract/portable.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/partial_push.cuh"
#include "kernels/cuda/common/device/rank_signals.cuh"
#include "kernels/cuda/common/device/shared_address.cuh"
#include "kernels/cuda/sm90/collective/all_reduce.h"
#include "kernels/cuda/sm90/collective/all_reduce_schedule.h"
#include "kernels/cuda/sm90/collective/row_quads.cuh"
#include "kernels/cuda/sm90/device/cluster.cuh"
#include "kernels/ops/rms_norm.h"

namespace isobit::cuda {

struct AllReduceJob {
  RankGroup group;
  size_t mailbox_bytes;  // two mailboxes follow the RankSignals
  const float* partial;  // [norm.rows, norm.hidden]; null: the linear layer has pushed it
  RmsNormArgs norm;
  int quads;     // per row
  int pieces;    // per row; kWarp quads each
  int cluster;   // blocks of a cluster
  int clusters;  // those that take rows; one more comes before them
  bool alone;    // no other rank uses this GPU
};

inline constexpr int kWarp = 32;
inline constexpr int kMaxChunkSums = 128;  // of 32 quads each

__device__ __forceinline__ bool Full(uint4 v) {
  return v.x != kEmpty && v.y != kEmpty && v.z != kEmpty && v.w != kEmpty;
}
__device__ __forceinline__ bool Full(uint2 v) { return v.x != kEmpty && v.y != kEmpty; }

// A block's slice (some columns) of the rows that its cluster computes. Rows, columns and quads are
// 32-bit numbers, to save registers.
template <typename Order, int kRanks, int kChunks, bool kAligned>
class RowSlice {
 public:
  // The sums of squares of the whole row, one for each 32 quads; two buffers, used in turn by rows.
  using Sums = float4[2][kMaxChunkSums / 4];

  __device__ RowSlice(const AllReduceJob& job, Sums& sums)
      : job_(job),
        sums_(sums),
        first_(static_cast<int>(BlockInCluster() * kChunks * blockDim.x + threadIdx.x)) {
    const int written = job_.cluster * kChunks * static_cast<int>(blockDim.x) / kWarp;
    for (int i = static_cast<int>(threadIdx.x); i < 2 * kMaxChunkSums;
         i += static_cast<int>(blockDim.x)) {
      if (i % kMaxChunkSums >= written) reinterpret_cast<float*>(sums_)[i] = 0.0f;
    }
    if constexpr (kKeepsWeight) LoadWeight();
  }

  // Selects one of the two mailboxes by the operation's number. Call it before any access to one.
  __device__ void Choose(const Operation& operation) {
    mailbox_ = MailboxOf(operation.number(), job_.mailbox_bytes);
  }

  __device__ bool active(int j) const { return quad(j) < job_.quads; }

  // This rank's partial. If the linear layer has pushed it, returns kEmpty, so that Collect reads
  // it from the mailbox, like those of the peers.
  __device__ uint4 Partial(int row, int j) const {
    if (job_.partial == nullptr) return {kEmpty, kEmpty, kEmpty, kEmpty};
    const uint4 v = LoadFloatQuad<kAligned>(job_.partial + Element(row, j), left(j));
    return {Sendable(v.x), Sendable(v.y), Sendable(v.z), Sendable(v.w)};
  }
  __device__ uint2 Residual(int row, int j) const {
    const Bf16* const from = job_.norm.residual + Element(row, j);
    if constexpr (kAligned) return LoadRelaxed(reinterpret_cast<const uint2*>(from));
    return LoadBf16Quad<kAligned>(from, left(j));
  }

  // The address, in rank `to`'s mailbox, of this thread's quad of an fp32 row from rank 0.
  __device__ uint4* FloatSlot(int to, int slot, int j) const {
    return FloatSlotOf(job_.group.memory[to] + mailbox_, slot, job_.pieces, kRanks, quad(j));
  }
  // The address, in that mailbox, of this thread's quad of bf16 row `slot`. The bf16 rows follow
  // `before` fp32 rows of every rank.
  __device__ uint2* Bf16Slot(int to, int before, int slot, int j) const {
    const int piece = (2 * kRanks * before + slot) * job_.pieces + quad(j) / kWarp;
    return reinterpret_cast<uint2*>(job_.group.memory[to] + mailbox_) +
           (static_cast<uint32_t>(piece * kWarp) + quad(j) % kWarp);
  }

  // Reads the peers' partials of a row from fp32 row `slot` of this rank's mailbox, and adds them
  // to the residual.
  __device__ void Collect(const Operation& operation, const uint4 (&own)[kChunks],
                          const uint2 (&residual)[kChunks], int slot, uint2 (&h)[kChunks]) const {
    const int rank = job_.group.rank;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      if (!active(j)) continue;
      const uint4* const from = FloatSlot(rank, slot, j);
      uint4 partials[kRanks];
#pragma unroll
      for (int q = 0; q < kRanks; ++q) {
        partials[q] = q == rank ? own[j] : uint4{kEmpty, kEmpty, kEmpty, kEmpty};
      }
      Wait wait(operation);
      while (true) {
        bool full = true;
#pragma unroll
        for (int q = 0; q < kRanks; ++q) {  // loads again what has not arrived yet
          if (!Full(partials[q])) partials[q] = LoadRelaxed(from + q * kWarp);
        }
#pragma unroll
        for (int q = 0; q < kRanks; ++q) full = full && Full(partials[q]);
        if (full || !wait.Again()) break;
      }
      h[j] = AddPartials<Order>(residual[j], partials, Bias(j));
    }
  }

  // Waits in bf16 row `slot` for h from the row's owner, and empties that row again.
  __device__ void Receive(const Operation& operation, int before, int slot,
                          uint2 (&h)[kChunks]) const {
    const int rank = job_.group.rank;
    Wait wait(operation);
    while (true) {
      bool full = true;
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        if (!active(j)) continue;
        h[j] = LoadRelaxed(Bf16Slot(rank, before, slot, j));
        full = full && Full(h[j]);
      }
      if (full || !wait.Again()) break;
    }
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      if (active(j)) StoreRelaxed(Bf16Slot(rank, before, slot, j), {kEmpty, kEmpty});
    }
  }

  // Empties fp32 row `slot` of this rank's mailbox again.
  __device__ void Empty(int slot) const {
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      if (!active(j)) continue;
#pragma unroll
      for (int q = 0; q < kRanks; ++q) {
        StoreRelaxed(FloatSlot(job_.group.rank, slot, j) + q * kWarp,
                     {kEmpty, kEmpty, kEmpty, kEmpty});
      }
    }
  }

  // Stores the row's residual h and its RMSNorm. `turn`: 0 and 1 alternately, the index in the
  // double buffer.
  __device__ void Finish(int row, const uint2 (&h)[kChunks], int turn) {
    const int lane = static_cast<int>(threadIdx.x % kWarp);
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      if (active(j)) {
        StoreBf16Quad<kAligned>(job_.norm.residual + Element(row, j), h[j], left(j));
      }
      const float sum = TreeOfLanes(active(j) ? SumOfSquares(h[j]) : 0.0f);
      float* const to = reinterpret_cast<float*>(sums_[turn]) + quad(j) / kWarp;
      if (job_.cluster == 1) {
        if (lane == 0) *to = sum;
      } else if (lane < job_.cluster) {
        StoreToBlock(AddressInBlock(SharedAddress(to), static_cast<uint32_t>(lane)), sum);
      }
    }
    if constexpr (!kKeepsWeight) LoadWeight();
    if (job_.cluster == 1) {
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
      StoreBf16Quad<kAligned>(job_.norm.out + Element(row, j),
                              {NormalisePair(h[j].x, inverse_rms, weight_[j].x),
                               NormalisePair(h[j].y, inverse_rms, weight_[j].y)},
                              left(j));
    }
  }

 private:
  // With one chunk, the weight is loaded once, before the predecessor has ended. With more there
  // are too few registers to keep it.
  static constexpr bool kKeepsWeight = kChunks == 1;
  __device__ void LoadWeight() {
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      if (active(j)) weight_[j] = LoadBf16Quad<kAligned>(job_.norm.weight + column(j), left(j));
    }
  }

  __device__ int quad(int j) const { return first_ + j * static_cast<int>(blockDim.x); }
  __device__ int column(int j) const { return kQuad * quad(j); }
  __device__ int left(int j) const { return static_cast<int>(job_.norm.hidden) - column(j); }
  __device__ int64_t Element(int row, int j) const { return row * job_.norm.hidden + column(j); }
  __device__ float4 Bias(int j) const {
    if (job_.norm.bias == nullptr) return {0.0f, 0.0f, 0.0f, 0.0f};
    const uint4 v = LoadFloatQuad<kAligned>(job_.norm.bias + column(j), left(j));
    return {contract::FromBits(v.x), contract::FromBits(v.y), contract::FromBits(v.z),
            contract::FromBits(v.w)};
  }

  const AllReduceJob& job_;
  Sums& sums_;
  const int first_;  // of this thread
  size_t mailbox_ = 0;
  uint2 weight_[kChunks];
};

// The work of the first cluster: the barrier with the peers that belongs to every operation. It
// runs in parallel with the data, which does not wait for it.
__device__ __forceinline__ void BarrierWithPeers(const RankGroup& group, bool waits) {
  if (waits) WaitForPredecessor();
  if (blockIdx.x == 0) AnnounceOperation(group);
  Operation operation(group);
  operation.TakeTicket();
  if (blockIdx.x == 0) operation.AwaitPeers();
  if (!waits) WaitForPredecessor();
  operation.End();
}

// Whether the sum waits at its start for the kernel before it. If that kernel pushes the partials,
// it does not, because every word of them shows whether it has arrived. The sum then waits before
// it counts itself as ended, because the pushing kernel reads that count.
//
// INVARIANT: when a sum of pushed partials starts, everything before the pushing kernel has ended
// (AllReduceTest.ReplaysWithDelays), including the previous sum, which wrote the residual and
// counted itself: the pushing kernel lets its successor start only after that. The L1 cache may
// still have old data, so the loads bypass it.
template <bool kAligned>
__device__ __forceinline__ bool WaitsFirst(const AllReduceJob& job) {
  return job.partial != nullptr || !kAligned;
}

// Releases the successor at the start. In a step this is a linear layer, which fetches its weights
// while this kernel waits for the peers. That saves 2 us for each sum of a decode step, compared
// with a release at the end (rows.h). Not done on a GPU that ranks share: there the
// successor's blocks could displace those of another rank, for which this rank waits.
__device__ __forceinline__ void ReleaseSuccessorIf(bool early) {
  if (early) ReleaseSuccessor();
}

inline __global__ void __launch_bounds__(kWarp)
    BarrierKernel(const __grid_constant__ RankGroup group, bool alone) {
  ReleaseSuccessorIf(alone);
  BarrierWithPeers(group, true);
}

inline __global__ void __launch_bounds__(kWarp)
    AwaitKernel(const __grid_constant__ RankGroup group, const uint32_t* counts, uint32_t wanted,
                bool alone) {
  ReleaseSuccessorIf(alone);
  WaitForPredecessor();
  Arrivals(group, counts, wanted).Await();
}

template <typename Order, int kRanks, bool kAligned>
__global__ void __launch_bounds__(1024, 1) OneShotKernel(const __grid_constant__ AllReduceJob job) {
  using Slice = RowSlice<Order, kRanks, 1, kAligned>;
  __shared__ typename Slice::Sums sums;
  ReleaseSuccessorIf(job.alone);
  const bool waits = WaitsFirst<kAligned>(job);
  if (static_cast<int>(blockIdx.x) < job.cluster) return BarrierWithPeers(job.group, waits);
  ArriveCluster();
  Slice slice(job, sums);
  if (waits) WaitForPredecessor();
  Operation operation(job.group);
  slice.Choose(operation);
  const int rank = job.group.rank;
  const int first = static_cast<int>(blockIdx.x) / job.cluster - 1;
  int turn = 0;
  for (int row = first; row < static_cast<int>(job.norm.rows); row += job.clusters, turn ^= 1) {
    uint4 own[1] = {};
    uint2 residual[1] = {};
    if (slice.active(0)) {
      own[0] = slice.Partial(row, 0);
      residual[0] = slice.Residual(row, 0);
      if (job.partial != nullptr) {
#pragma unroll
        for (int d = 1; d < kRanks; ++d) {
          StoreRelaxed(slice.FloatSlot((rank + d) % kRanks, row, 0) + rank * kWarp, own[0]);
        }
      }
    }
    if (row == first) {
      operation.TakeTicket();
      WaitCluster();
    }
    uint2 h[1] = {};
    slice.Collect(operation, own, residual, row, h);
    slice.Finish(row, h, turn);
    slice.Empty(row);
  }
  if (!waits) WaitForPredecessor();
  operation.End();
}

// Rank r % kRanks owns row r. A rank's mailbox has the peers' partials of the rows that it owns,
// then a bf16 row of the new residual for every row.
template <typename Order, int kRanks, int kChunks, bool kAligned>
__global__ void __launch_bounds__(1024 / kChunks, kChunks)
    TwoShotKernel(const __grid_constant__ AllReduceJob job) {
  using Slice = RowSlice<Order, kRanks, kChunks, kAligned>;
  __shared__ typename Slice::Sums sums;
  ReleaseSuccessorIf(job.alone);
  const bool waits = WaitsFirst<kAligned>(job);
  if (static_cast<int>(blockIdx.x) < job.cluster) return BarrierWithPeers(job.group, waits);
  ArriveCluster();
  Slice slice(job, sums);
  if (waits) WaitForPredecessor();
  Operation operation(job.group);
  slice.Choose(operation);
  const int rank = job.group.rank;
  const int rows = static_cast<int>(job.norm.rows);
  const int owned = (rows + kRanks - 1) / kRanks;
  const int first = static_cast<int>(blockIdx.x) / job.cluster - 1;
  const auto give = [&](int row) {
    const int owner = row % kRanks;
    if (row >= rows || owner == rank || job.partial == nullptr) return;
    uint4 own[kChunks];
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      if (slice.active(j)) own[j] = slice.Partial(row, j);
    }
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      if (!slice.active(j)) continue;
      StoreRelaxed(slice.FloatSlot(owner, row / kRanks, j) + rank * kWarp, own[j]);
    }
  };
  give(first);
  operation.TakeTicket();
  WaitCluster();
  int turn = 0;
  for (int i = first; i < rows; i += job.clusters, turn ^= 1) {
    give(i + job.clusters);
    const int row = job.partial == nullptr ? OwnRowsFirst(i, rows, rank, kRanks) : i;
    uint2 h[kChunks] = {};
    if (row % kRanks == rank) {
      uint4 own[kChunks] = {};
      uint2 residual[kChunks] = {};
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        if (!slice.active(j)) continue;
        own[j] = slice.Partial(row, j);
        residual[j] = slice.Residual(row, j);
      }
      slice.Collect(operation, own, residual, row / kRanks, h);
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        if (!slice.active(j)) continue;
#pragma unroll
        for (int d = 1; d < kRanks; ++d) {
          StoreRelaxed(slice.Bf16Slot((rank + d) % kRanks, owned, row, j), h[j]);
        }
      }
      slice.Empty(row / kRanks);
    } else {
      slice.Receive(operation, owned, row, h);
    }
    slice.Finish(row, h, turn);
  }
  if (!waits) WaitForPredecessor();
  operation.End();
}

template <typename Order, int kRanks, bool kAligned>
AllReduceKernel AllReduceKernelFor(const AllReduceSchedule& schedule) {
  if (!schedule.two_shots) return OneShotKernel<Order, kRanks, kAligned>;
  if constexpr (kRanks <= 4) {
    if (schedule.chunks == 2) return TwoShotKernel<Order, kRanks, 2, kAligned>;
  }
  return TwoShotKernel<Order, kRanks, 1, kAligned>;
}

// An AllReduceKernels that adds in `Order`.
template <typename Order>
AllReduceKernel AllReduceKernelFor(const AllReduceSchedule& schedule, int ranks, bool aligned) {
  switch (ranks) {
    case 2:
      return aligned ? AllReduceKernelFor<Order, 2, true>(schedule)
                     : AllReduceKernelFor<Order, 2, false>(schedule);
    case 4:
      return aligned ? AllReduceKernelFor<Order, 4, true>(schedule)
                     : AllReduceKernelFor<Order, 4, false>(schedule);
    default:
      return aligned ? AllReduceKernelFor<Order, 8, true>(schedule)
                     : AllReduceKernelFor<Order, 8, false>(schedule);
  }
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_COLLECTIVE_ALL_REDUCE_CUH_
