// The linear layer for few rows of x. Weights pass through shared memory once, as wgmma's 64-row
// operand; x, padded to kColumns rows, is the narrow operand.
//
// A block has four warps that multiply (eight if kWarpgroups is 2) and four that copy. A copy takes
// about 150 cycles to issue, so the copying warps take the stages in turn. A block makes passes
// over up to 64 kWarpgroups packed weight rows. In each pass it takes its leaves in order, K tile
// by K tile. Without kSplit, a block has all leaves and a share of the rows. With kSplit, the
// leaves of a pass are distributed over a cluster. Each block adds up alone what the order of
// addition permits: in a tree, the subtree of its leaves; in a chain, the prefix if it is the first
// block, otherwise only single leaves. It sends these sums to the blocks of the cluster, each of
// which finishes some outputs.
//
// Weights are fetched before the kernel waits for its predecessor.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_STREAM_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_STREAM_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/contract/leaf_plan.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/cuda/sm90/device/barrier.cuh"
#include "kernels/cuda/sm90/device/bulk_copy.cuh"
#include "kernels/cuda/sm90/device/cluster.cuh"
#include "kernels/cuda/sm90/device/wgmma.cuh"
#include "kernels/cuda/sm90/linear/layout.h"
#include "kernels/cuda/sm90/linear/output.cuh"
#include "kernels/cuda/sm90/linear/schedule.h"
#include "kernels/cuda/sm90/linear/stream_plan.h"

namespace isobit::cuda {

struct StreamArgs {
  const std::byte* packed;
  LeafBlocks leaves;
  LinearTarget target;
  StreamSchedule schedule;
  int32_t strips;  // of 16 packed weight rows
  // The strips of a block that has all leaves, in units of 2^-32; rounded up, so that the last
  // block ends with the last strip.
  uint64_t strips_each;
  int32_t cluster;    // blocks that share a pass
  Exchange exchange;  // between them
};

// A cursor over a block's K tiles: where the weights of the next one are.
struct KTileCursor {
  int row;  // first packed row of the pass
  int leaf;
  int block;  // of the weight
};

template <int kColumns, contract::LeafSum kSum, LinearOutput kOutput, bool kSplit, int kWarpgroups>
struct LinearStream {
  static constexpr int kSums = kColumns / 2;  // of a thread
  static constexpr int kMultiplyThreads = 128 * kWarpgroups;

  const StreamArgs& args;
  const CUtensorMap& x_map;
  const StreamPlan plan;
  const uint32_t shared;
  // At most the number of stages. Otherwise a warp could get two rounds ahead of a stage, which the
  // parity cannot distinguish from being level.
  const int copy_warps;
  int first_leaf;
  int end_leaf;
  int first_row;
  int end_row;
  uint32_t operation = 0;  // OperationOf

  __device__ __forceinline__ uint32_t full(int stage) const {
    return shared + plan.barriers + stage * 16;
  }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stage) + 8; }
  __device__ __forceinline__ uint32_t received() const { return full(args.schedule.stages); }

  __device__ __forceinline__ LinearStream(const StreamArgs& a, const CUtensorMap& map,
                                          uint32_t shared_address)
      : args(a),
        x_map(map),
        plan(a.schedule, kColumns, kSplit ? a.exchange.bytes() : 0),
        shared(shared_address),
        copy_warps(min(kCopyWarps, a.schedule.stages)) {
    const int block = static_cast<int>(blockIdx.x);
    if constexpr (kSplit) {
      first_leaf = block % args.cluster * args.schedule.leaves;
      end_leaf = first_leaf + args.schedule.leaves;
      first_row = block / args.cluster * args.schedule.rows;
      end_row = min(first_row + args.schedule.rows, args.strips * kStripRows);
    } else {
      const auto share = [&](int i) {
        return static_cast<int>(i * args.strips_each >> 32) * kStripRows;
      };
      first_leaf = 0;
      end_leaf = args.leaves.num_leaves;
      first_row = share(block);
      end_row = share(block + 1);
    }
  }

  __device__ __forceinline__ KTileCursor Begin() const {
    return {first_row, first_leaf, args.leaves.block[first_leaf]};
  }
  __device__ __forceinline__ bool Ended(const KTileCursor& c) const { return c.row >= end_row; }
  __device__ __forceinline__ void Next(KTileCursor& c) const {
    c.block += kKTileBlocks;
    if (c.block < args.leaves.block[c.leaf + 1]) return;
    if (++c.leaf == end_leaf) {
      c.leaf = first_leaf;
      c.row += args.schedule.rows;
    }
    c.block = args.leaves.block[c.leaf];
  }
  __device__ __forceinline__ void Skip(KTileCursor& c, int stages) const {
#pragma unroll 1
    for (int i = 0; i < stages && !Ended(c); ++i) Next(c);
  }
  __device__ __forceinline__ int BlocksOf(const KTileCursor& c) const {
    return min(kKTileBlocks, args.leaves.block[c.leaf + 1] - c.block);
  }

  // Makes a stage's barrier expect weights and x, and starts copying the weights.
  __device__ __forceinline__ void CopyWeights(const KTileCursor& c, int stage) const {
    const int blocks = BlocksOf(c);
    const int rows = min(args.schedule.rows, end_row - c.row);
    const int row_in_tile = c.row % kTileRows;
    uint32_t to = shared + stage * plan.weight_bytes;
    const int64_t tile_bytes = int64_t{args.leaves.num_blocks()} * kBlockBytes;
    const std::byte* from = args.packed + c.row / kTileRows * tile_bytes +
                            int64_t{c.block} * kBlockBytes + row_in_tile * kRowBytes;
    ExpectBytes(full(stage), blocks * (rows + kColumns) * kRowBytes);
    if (rows == kTileRows && args.schedule.rows == kTileRows && row_in_tile == 0) {
      CopyBytes(to, from, blocks * kBlockBytes, full(stage), kEvictFirst);
      return;
    }
#pragma unroll 1
    for (int b = 0; b < blocks; ++b) {
      // Copies row tile by row tile; the first one from row_in_tile on.
      const std::byte* piece = from;
      int in_tile = row_in_tile;
      for (int done = 0; done < rows;) {
        const int count = min(rows - done, kTileRows - in_tile);
        CopyBytes(to + done * kRowBytes, piece, count * kRowBytes, full(stage), kEvictFirst);
        done += count;
        piece += tile_bytes - in_tile * kRowBytes;
        in_tile = 0;
      }
      to += args.schedule.rows * kRowBytes;
      from += kBlockBytes;
    }
  }

  __device__ __forceinline__ void CopyX(const KTileCursor& c, int stage) const {
    const int blocks = BlocksOf(c);
    // An empty leaf after an incomplete one starts within a k16 step. Its columns do not matter,
    // but a box must start at a multiple of 16 bytes.
    const int column = args.leaves.column[c.leaf] / contract::kMmaK * contract::kMmaK +
                       (c.block - args.leaves.block[c.leaf]) * kBlockColumns;
#pragma unroll 1
    for (int b = 0; b < blocks; ++b) {
      CopyBox(shared + plan.x + stage * plan.x_bytes + b * kColumns * kRowBytes, x_map,
              static_cast<int>(blockIdx.y) * kColumns, column + b * kBlockColumns, full(stage),
              kEvictLast);
    }
  }

  // Run by one thread of copying warp number `warp`. Initialises the barriers of its first stages
  // and starts copying their weights. Returns the cursor to the next K tile.
  __device__ __forceinline__ KTileCursor Prefetch(int warp) const {
    KTileCursor c = Begin();
    Skip(c, warp);
#pragma unroll 1
    for (int stage = warp; stage < args.schedule.stages; stage += copy_warps) {
      InitBarrier(full(stage), 1);
      InitBarrier(empty(stage), kMultiplyThreads / 32);
      FenceBarrierInit();
      if (Ended(c)) continue;
      CopyWeights(c, stage);
      Skip(c, copy_warps);
    }
    return c;
  }

  // Run by the same thread. Copies x for those stages, then weights and x for all others.
  __device__ __forceinline__ void Copy(KTileCursor c, int warp) const {
    WaitForPredecessor();
    ReleaseAfterWait(args.target);
    KTileCursor x = Begin();
    Skip(x, warp);
    int stage = warp;
#pragma unroll 1
    for (; stage < args.schedule.stages && !Ended(x); stage += copy_warps) {
      CopyX(x, stage);
      Skip(x, copy_warps);
    }
    int turn = 0;  // rounds of the ring so far
#pragma unroll 1
    for (; !Ended(c); stage += copy_warps) {
      while (stage >= args.schedule.stages) {
        stage -= args.schedule.stages;
        ++turn;
      }
      WaitBarrier(empty(stage), (turn + 1) % 2);
      CopyWeights(c, stage);
      CopyX(c, stage);
      Skip(c, copy_warps);
    }
  }

  __device__ __forceinline__ uint32_t WeightsOf(int stage, int block) const {
    return shared + stage * plan.weight_bytes + block * args.schedule.rows * kRowBytes +
           static_cast<int>(threadIdx.x) / 128 * kBlockBytes;
  }
  __device__ __forceinline__ uint32_t XOf(int stage, int block) const {
    return shared + plan.x + stage * plan.x_bytes + block * kColumns * kRowBytes;
  }

  // Starts the products of a stage whose k16 steps all belong to the leaf. There is only one run of
  // products, whose descriptors differ by constants: with a choice between two runs, each product
  // would wait for the one before it.
  __device__ __forceinline__ void MultiplyStage(float (&sums)[kSums], int stage) const {
    // The result of a reduction is in a uniform register, where descriptors must be.
    const uint64_t x_operand = KMajorOperand(__reduce_or_sync(0xffffffffu, XOf(stage, 0)));
    uint64_t w_operand[kKTileBlocks];
#pragma unroll
    for (int b = 0; b < kKTileBlocks; ++b) {
      w_operand[b] = KMajorOperand(__reduce_or_sync(0xffffffffu, WeightsOf(stage, b)));
    }
    FenceMma();
#pragma unroll
    for (int i = 0; i < kKTileSteps; ++i) {
      const int block = i / kBlockSteps;
      const int step = 2 * (i % kBlockSteps);
      Wgmma<kColumns>::Mma(sums, w_operand[block] + step,
                           x_operand + block * kColumns * kRowBytes / 16 + step, true);
    }
    CommitMma();
  }

  // The products of a leaf's last stage, one by one, if only its first `steps` k16 steps belong to
  // the leaf. The content behind these may be anything.
  __device__ __forceinline__ void MultiplySteps(float (&sums)[kSums], int stage, int steps) const {
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      const int block = i / kBlockSteps;
      const int step = 2 * (i % kBlockSteps);
      FenceMma();
      Wgmma<kColumns>::Mma(sums, KMajorOperand(WeightsOf(stage, block)) + step,
                           KMajorOperand(XOf(stage, block)) + step, true);
      CommitMma();
      WaitMma<0>();
      Hold(sums);
    }
  }
  // Prevents the compiler from reading sums before the wait above.
  static __device__ __forceinline__ void Hold(float (&sums)[kSums]) {
#pragma unroll
    for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");
  }

  // Adds leaf number `leaf` of the block (from 0) to the pending sums of a tree; `sums` then holds
  // the largest finished subtree. The branches are outside the loops for speed.
  struct Tree {
    float pair[kSums];
    float four[kSums];
    float eight[kSplit ? 1 : kSums];  // a block of a cluster has at most four leaves
    __device__ __forceinline__ void Add(int leaf, float (&sums)[kSums]) {
      if (leaf % 2 == 0) return Keep(pair, sums);
      AddTo(sums, pair);
      if (leaf % 4 == 1) return Keep(four, sums);
      AddTo(sums, four);
      if constexpr (!kSplit) {
        if (leaf % 8 == 3) return Keep(eight, sums);
        AddTo(sums, eight);
      }
    }
  };
  struct Chain {
    float prefix[kSums];
    __device__ __forceinline__ void Add(int leaf, float (&sums)[kSums]) {
      if (leaf > 0) AddTo(sums, prefix);
      Keep(prefix, sums);
    }
  };
  static __device__ __forceinline__ void Keep(float (&to)[kSums], const float (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) to[i] = sums[i];
  }
  static __device__ __forceinline__ void AddTo(float (&sums)[kSums], const float (&left)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = contract::Add(left[i], sums[i]);
  }

  // The multiplying warps' work: all computation.
  __device__ __forceinline__ void Multiply() {
    if (kOutput == LinearOutput::kFp32 && args.target.pushes) {
      WaitForPredecessor();
      operation = OperationOf(args.target);
    }
    using Pending = std::conditional_t<kSum == contract::LeafSum::kTree, Tree, Chain>;
    const int stages = args.schedule.stages;
    Pending pending;
    float sums[kSums];
    bool joined = false;
    int stage = 0;
    uint32_t parity = 0;
    const auto advance = [&] {
      if (++stage < stages) return;
      stage = 0;
      parity ^= 1;
    };
#pragma unroll 1
    for (int row = first_row; row < end_row; row += args.schedule.rows) {
#pragma unroll 1
      for (int leaf = first_leaf; leaf < end_leaf; ++leaf) {
        const int steps =
            (args.leaves.column[leaf + 1] - args.leaves.column[leaf] + contract::kMmaK - 1) /
            contract::kMmaK;
        const int full_k_tiles = steps / kKTileSteps;
#pragma unroll
        for (float& sum : sums) sum = 0.0f;
#pragma unroll 1
        for (int i = 0; i < full_k_tiles; ++i) {
          WaitBarrier(full(stage), parity);
          MultiplyStage(sums, stage);
          if (i > 0) {
            WaitMma<1>();
            Release(stage == 0 ? stages - 1 : stage - 1);
          }
          advance();
        }
        WaitMma<0>();
        Hold(sums);
        if (full_k_tiles > 0) Release(stage == 0 ? stages - 1 : stage - 1);
        // An empty leaf has a K tile, too.
        if (steps == 0 || steps % kKTileSteps != 0) {
          WaitBarrier(full(stage), parity);
          MultiplySteps(sums, stage, steps % kKTileSteps);
          Release(stage);
          advance();
        }
        if constexpr (kSplit) {
          const int rank = first_leaf / args.schedule.leaves;
          if (kSum == contract::LeafSum::kTree || rank == 0) {
            pending.Add(leaf - first_leaf, sums);
            if (leaf == end_leaf - 1) Push(sums, rank, joined);
          } else {
            Push(sums, leaf - args.schedule.leaves + 1, joined);
          }
        } else {
          pending.Add(leaf, sums);
        }
      }
      if constexpr (!kSplit) {
        const int warp = static_cast<int>(threadIdx.x) / 32;
        if (row + warp * kStripRows < end_row && warp * kStripRows < args.schedule.rows) {
          Finish<kColumns / 8>(row + warp * kStripRows, 0, sums);
        }
      }
    }
    if constexpr (kSplit) FinishReceived();
  }

  __device__ __forceinline__ void Release(int stage) const {
    if (threadIdx.x % 32 == 0) Arrive(empty(stage));
  }

  // Finishes kUnits units: packed rows from `row` on, and the block's rows of x from 8 j on.
  template <int kUnits>
  __device__ __forceinline__ void Finish(int row, int j, float (&sums)[4 * kUnits]) const {
    FinishUnits<kOutput, kUnits>(args.target, row, static_cast<int>(blockIdx.y) * kColumns + 8 * j,
                                 sums, operation);
  }

  // Sends the sums to the blocks that finish them, into slot `slot` of those blocks.
  __device__ __forceinline__ void Push(const float (&sums)[kSums], int slot, bool& joined) const {
    if (!joined) WaitCluster();  // every block of the cluster has initialised its barrier
    joined = true;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int log_units = __ffs(args.exchange.units_each) - 1;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const int unit = 4 * j + warp;
      const int to = unit >> log_units;
      const int at = (slot << log_units) + (unit & (args.exchange.units_each - 1));
      StoreToBlock(AddressInBlock(shared + plan.received + at * kUnitBytes + lane * 16, to),
                   sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3],
                   AddressInBlock(received(), to));
    }
  }

  // Finishes the block's units. This warp takes every
  // fourth one; these have the same weight rows.
  __device__ __forceinline__ void FinishReceived() const {
    const int rank = first_leaf / args.schedule.leaves;
    if (rank * args.exchange.units_each >= kColumns / 2) return;
    WaitClusterBarrier(received(), 0);
    if (kColumns >= 64 && args.exchange.units_each == 16) return FinishReceived<4>(rank);
    if (kColumns >= 32 && args.exchange.units_each == 8) return FinishReceived<2>(rank);
    if (static_cast<int>(threadIdx.x) / 32 < args.exchange.units_each) FinishReceived<1>(rank);
  }

  template <int kUnits>
  __device__ __forceinline__ void FinishReceived(int rank) const {
    extern __shared__ __align__(1024) std::byte memory[];
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int unit = rank * args.exchange.units_each + warp;
    const int row = first_row + unit % 4 * kStripRows;
    if (row >= end_row) return;
    float sums[4 * kUnits];
    const auto load = [&](int slot, float(&to)[4 * kUnits]) {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        const float4 sum = *reinterpret_cast<const float4*>(
            memory + plan.received + (slot * args.exchange.units_each + warp + 4 * u) * kUnitBytes +
            threadIdx.x % 32 * 16);
        to[4 * u] = sum.x;
        to[4 * u + 1] = sum.y;
        to[4 * u + 2] = sum.z;
        to[4 * u + 3] = sum.w;
      }
    };
    const auto add = [](float(&left)[4 * kUnits], const float(&right)[4 * kUnits]) {
#pragma unroll
      for (int i = 0; i < 4 * kUnits; ++i) left[i] = contract::Add(left[i], right[i]);
    };
    const auto add_slot = [&](float(&left)[4 * kUnits], int slot) {
      float right[4 * kUnits];
      load(slot, right);
      add(left, right);
    };
    load(0, sums);
    if constexpr (kSum == contract::LeafSum::kChain) {
#pragma unroll 4
      for (int s = 1; s < args.exchange.slots; ++s) add_slot(sums, s);
    } else {
      add_slot(sums, 1);
      if (args.exchange.slots > 2) {
        float two[4 * kUnits];
        load(2, two);
        add_slot(two, 3);
        add(sums, two);
      }
      if (args.exchange.slots > 4) {
        float four[4 * kUnits];
        load(4, four);
        add_slot(four, 5);
        float six[4 * kUnits];
        load(6, six);
        add_slot(six, 7);
        add(four, six);
        add(sums, four);
      }
    }
    Finish<kUnits>(row, unit / 4, sums);
  }
};

// So many blocks must find registers on a multiprocessor: those that the schedule table plans
// (schedule.cc, Whole), or one block and one of the next kernel. The pending sums of a tree need
// more registers.
template <int kColumns, contract::LeafSum kSum, bool kSplit, int kWarpgroups>
inline constexpr int kBlocksForRegisters =
    kWarpgroups == 2 || (kColumns == 64 && kSum == contract::LeafSum::kTree) ? 1
    : !kSplit && kColumns <= (kSum == contract::LeafSum::kTree ? 16 : 32)    ? 3
                                                                             : 2;

template <int kColumns, contract::LeafSum kSum, LinearOutput kOutput, bool kSplit, int kWarpgroups>
__global__ void __launch_bounds__(StreamThreads(kWarpgroups),
                                  kBlocksForRegisters<kColumns, kSum, kSplit, kWarpgroups>)
    LinearStreamKernel(const __grid_constant__ CUtensorMap x_map,
                       const __grid_constant__ StreamArgs args) {
  extern __shared__ __align__(1024) std::byte memory[];
  LinearStream<kColumns, kSum, kOutput, kSplit, kWarpgroups> stream(args, x_map,
                                                                    SharedAddress(memory));
  // The same in every lane, in a way that the compiler recognises.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const int copy_warp = warp - 4 * kWarpgroups;
  const bool copies = copy_warp >= 0 && copy_warp < stream.copy_warps && threadIdx.x % 32 == 0;
  KTileCursor cursor = stream.Begin();
  if (kSplit && threadIdx.x == 0) {
    InitBarrier(stream.received(), 1);
    FenceBarrierInit();
    ExpectBytes(stream.received(), args.exchange.bytes());
  }
  if (threadIdx.x == 0) PrefetchMap(x_map);
  if (copies) cursor = stream.Prefetch(copy_warp);
  ReleaseAtStart(args.target);
  __syncthreads();
  if constexpr (kSplit) ArriveCluster();
  if (copy_warp < 0) {
    stream.Multiply();
  } else {
    if (copies) stream.Copy(cursor, copy_warp);
    __syncwarp();
    if constexpr (kSplit) WaitCluster();
  }
}

// Launches the kernel for one number of columns. Each number has a file of its own.
template <int kColumns>
absl::Status LaunchStreamOf(const CUtensorMap& x_map, const StreamArgs& args, LinearOutput output,
                            contract::LeafSum sum, const Grid& grid, const Stream& stream) {
  using contract::LeafSum;
  const auto launch = [&]<LeafSum kSum, LinearOutput kOutput>() {
    const auto of = [&](auto* kernel) { return Launch(kernel, grid, stream, x_map, args); };
    if constexpr (HasWideStream(kColumns, kSum)) {
      if (args.schedule.rows > kTileRows) {
        return of(&LinearStreamKernel<kColumns, kSum, kOutput, false, 2>);
      }
    }
    return args.cluster > 1 ? of(&LinearStreamKernel<kColumns, kSum, kOutput, true, 1>)
                            : of(&LinearStreamKernel<kColumns, kSum, kOutput, false, 1>);
  };
  const auto of_sum = [&]<LeafSum kSum>() {
    switch (output) {
      case LinearOutput::kBf16:
        return launch.template operator()<kSum, LinearOutput::kBf16>();
      case LinearOutput::kFp32:
        return launch.template operator()<kSum, LinearOutput::kFp32>();
      case LinearOutput::kSwiGlu:
        return launch.template operator()<kSum, LinearOutput::kSwiGlu>();
    }
    return absl::InternalError("no such output");
  };
  return sum == LeafSum::kTree ? of_sum.template operator()<LeafSum::kTree>()
                               : of_sum.template operator()<LeafSum::kChain>();
}

extern template absl::Status LaunchStreamOf<8>(const CUtensorMap&, const StreamArgs&, LinearOutput,
                                               contract::LeafSum, const Grid&, const Stream&);
extern template absl::Status LaunchStreamOf<16>(const CUtensorMap&, const StreamArgs&, LinearOutput,
                                                contract::LeafSum, const Grid&, const Stream&);
extern template absl::Status LaunchStreamOf<32>(const CUtensorMap&, const StreamArgs&, LinearOutput,
                                                contract::LeafSum, const Grid&, const Stream&);
extern template absl::Status LaunchStreamOf<64>(const CUtensorMap&, const StreamArgs&, LinearOutput,
                                                contract::LeafSum, const Grid&, const Stream&);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_STREAM_CUH_
