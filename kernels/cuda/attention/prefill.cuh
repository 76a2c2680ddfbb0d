// The kernel behind LaunchPrefillAttention and Run, for one head size.
//
// A block takes 64 rows for each consumer warpgroup, all of one sequence and one KV head. A row is
// a pair of a token and a query head of that KV head, tokens outermost. One more warpgroup copies
// tiles of keys and values into a ring buffer (prefill_ring.cuh). A consumer keeps its scores and
// the current split's accumulators in registers, and the folded result of earlier splits in shared
// memory. While one consumer computes its softmax, others use the tensor cores.
#ifndef ISOBIT_KERNELS_CUDA_ATTENTION_PREFILL_CUH_
#define ISOBIT_KERNELS_CUDA_ATTENTION_PREFILL_CUH_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/contract/attention.h"
#include "kernels/contract/gradients.h"
#include "kernels/contract/portable.h"
#include "kernels/cuda/attention/prefill_ring.cuh"
#include "kernels/cuda/attention/softmax_fragment.cuh"
#include "kernels/cuda/device/barrier.cuh"
#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/wgmma.cuh"

namespace isobit::cuda {

// Returns x. `hidden`: hides from the compiler that the result is x. Otherwise it would keep values
// derived from x in registers through a loop that needs all of them.
template <bool hidden>
__device__ __forceinline__ uint32_t Afresh(uint32_t x) {
  if constexpr (!hidden) return x;
  asm volatile("" : "+r"(x));
  return static_cast<uint32_t>(Uniform(static_cast<int>(x)));
}

// Calls use(valid, row, column, offset) for each 16 bytes of a consumer's 64 rows. valid: the row
// exists; row, column: its place in q and out; offset: in shared memory, swizzled.
template <class Shape, int kHeadDim, KvSource kSource, typename Use>
__device__ __forceinline__ void ForEachChunk(const PrefillParams& p, const PrefillBlock& work,
                                             int consumer, Use use) {
  constexpr int kChunks = kHeadDim / 8;
  const int head_dim = kSource == KvSource::kRows ? p.head_dim : kHeadDim;
  const int first_pair = work.first_pair + consumer * 64;
  const int first_token = first_pair / p.heads_per_kv;
  const int first_head = first_pair - first_token * p.heads_per_kv;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x % 128); i < 64 * kChunks; i += 128) {
    const int r = i / kChunks;
    const int chunk = i % kChunks;
    const int tokens = p.heads_per_kv == 1
                           ? r
                           : static_cast<int>(__umulhi(first_head + r, p.inverse_heads_per_kv));
    const int head = work.kv_head * p.heads_per_kv + first_head + r - tokens * p.heads_per_kv;
    use(first_pair + r < work.end_pair && (kSource != KvSource::kRows || chunk * 8 < head_dim),
        int64_t{work.first_row} + first_token + tokens, head * head_dim + chunk * 8,
        chunk / 8 * Shape::kQueryBlockBytes + r * 128 + ((chunk % 8) ^ (r % 8)) * 16);
  }
}

// One consumer warpgroup, which computes 64 rows from start to end. A thread has two of them.
template <class Shape, int kHeadDim, KvSource kSource>
class PrefillConsumer {
 public:
  __device__ __forceinline__ PrefillConsumer(const PrefillParams& p, const PrefillBlock& work,
                                             const PrefillRing<Shape>& ring, uint8_t* shared,
                                             int consumer)
      : p_(p),
        work_(work),
        ring_(ring),
        consumer_(consumer),
        thread_(static_cast<int>(threadIdx.x % 128)),
        lane_(thread_ % 32),
        first_pair_(work.first_pair + consumer * 64),
        shared_(shared) {}

  __device__ __forceinline__ void Run() {
    LoadQueries();
    FindTiles();
    PassOver(first_tile_ - Uniform(work_.first_tile));
    softmax_.Reset();
    MultiplyKeys();
    Weigh(first_tile_);
    SoftmaxFragment::Pack<kTile>(scores_, weights_);
    for (int tile = first_tile_; tile + 1 < end_tile_; ++tile) {
      const bool split_ends = (tile + 1) % Shape::kTilesOfSplit == 0;
      MultiplyValues(tile, split_ends);
      MultiplyKeys();
      Weigh(tile + 1);
      if (!split_ends) {
#pragma unroll
        for (int i = 0; i < kAccumulators; ++i) acc_[i] = contract::Mul(acc_[i], alpha_[i / 2 % 2]);
      }
      SoftmaxFragment::Pack<kTile>(scores_, weights_);
    }
    MultiplyValues(end_tile_ - 1, true);
    PassOver(work_.end_tile - end_tile_);
    StoreRows();
  }

 private:
  static constexpr int kTile = Shape::kTile;
  static constexpr int kAccumulators = Shape::kAccumulators;
  static constexpr int kSharedTotals = Shape::kSharedTotals;
  static constexpr bool kHidden = Shape::kRegisterTotals > 0;

  // In shared memory: the warpgroup's queries, and the thread's totals, each 128 places apart.
  __device__ __forceinline__ uint8_t* Queries() const {
    return shared_ + consumer_ * Shape::kQueryBytes;
  }
  __device__ __forceinline__ float4* SharedTotals() const {
    return reinterpret_cast<float4*>(shared_ + Shape::kTotals + consumer_ * Shape::kTotalBytes) +
           thread_;
  }

  __device__ __forceinline__ void Release(uint32_t barrier) {
    if (lane_ == 0) Arrive(barrier);
  }
  __device__ __forceinline__ void PassOver(int tiles) {
    for (int i = 0; i < tiles; ++i, cursor_.Advance()) {
      WaitBarrier(ring_.KeysFull(cursor_.stage), cursor_.parity);
      Release(ring_.KeysEmpty(cursor_.stage));
      WaitBarrier(ring_.ValuesFull(cursor_.stage), cursor_.parity);
      Release(ring_.ValuesEmpty(cursor_.stage));
    }
  }

  // Also clears the totals.
  __device__ __forceinline__ void LoadQueries() {
    ForEachChunk<Shape, kHeadDim, kSource>(
        p_, work_, consumer_, [&](bool valid, int64_t row, int column, int offset) {
          const Bf16* from = p_.q + row * p_.ldq + column;
          uint4 data = {0, 0, 0, 0};
          if (valid && p_.q_vectors) {
            data = *reinterpret_cast<const uint4*>(from);
          } else if (valid) {
            uint32_t* words = &data.x;
            for (int i = 0; i < 4; ++i) words[i] = from[2 * i] | uint32_t{from[2 * i + 1]} << 16;
          }
          *reinterpret_cast<uint4*>(Queries() + offset) = data;
        });
    for (int i = 0; i < kSharedTotals / 4; ++i) SharedTotals()[i * 128] = {0.0f, 0.0f, 0.0f, 0.0f};
    FenceSharedForAsync();
    SyncThreads(1 + consumer_, 128);
  }

  // Sets the positions of the thread's rows, and which tiles they see.
  __device__ __forceinline__ void FindTiles() {
    const int last_pair = min(work_.end_pair, first_pair_ + 64) - 1;
    const int first_position = work_.PositionOf(first_pair_, p_.heads_per_kv);
    const int last_position = work_.PositionOf(last_pair, p_.heads_per_kv);
    for (int h = 0; h < 2; ++h) {
      position_[h] = work_.PositionOf(
          min(last_pair, first_pair_ + thread_ / 32 * 16 + lane_ / 4 + 8 * h), p_.heads_per_kv);
    }
    first_tile_ = Uniform(p_.window == 0 ? 0 : max(0, first_position - p_.window + 1) / kTile);
    end_tile_ = Uniform(last_position / kTile + 1);
    full_tile_ = Uniform(p_.window == 0 ? 0 : max(0, last_position - p_.window + kTile) / kTile);
    full_end_tile_ = Uniform((first_position + 1) / kTile);
  }

  // The scores of the next tile of keys.
  __device__ __forceinline__ void MultiplyKeys() {
    WaitBarrier(ring_.KeysFull(cursor_.stage), cursor_.parity);
    FenceMma();
    const uint64_t q_operand =
        KMajorOperand(Afresh<kHidden>(ring_.base + consumer_ * Shape::kQueryBytes));
    const uint64_t k_operand = KMajorOperand(Afresh<kHidden>(ring_.Keys(cursor_.stage)));
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      const int step = k % 4 * 32;  // bytes of 16 columns
      Wgmma<kTile>::Mma(scores_, Further(q_operand, k / 4 * Shape::kQueryBlockBytes + step),
                        Further(k_operand, k / 4 * Shape::kTileBlockBytes + step), k != 0);
    }
    CommitMma();
    WaitMma<0>();
    Release(ring_.KeysEmpty(cursor_.stage));
  }

  // Turns the scores of a tile into weights.
  __device__ __forceinline__ void Weigh(int tile) {
    const int first_key = tile * kTile;
    float shift_of_none[2] = {contract::kMinusInfinity, contract::kMinusInfinity};
    if (__builtin_expect(tile < full_tile_ || tile >= full_end_tile_, 0)) {
      SeenKeys seen;
      for (int h = 0; h < 2; ++h) {
        seen.upto[h] = position_[h] - first_key;
        seen.after[h] = p_.window == 0 ? -1 : seen.upto[h] - p_.window;
        if (!seen.Any(h, kTile)) shift_of_none[h] = 0.0f;
      }
      SoftmaxFragment::Mask<kTile>(scores_, seen);
    }
    softmax_.Update<kTile>(scores_, p_.scale, shift_of_none, alpha_);
  }

  // Adds the next tile's values, weighted. If the split ends with it, folds the split's result.
  __device__ __forceinline__ void MultiplyValues(int tile, bool split_ends) {
    const RingCursor<Shape> now = cursor_;
    cursor_.Advance();
    WaitBarrier(ring_.ValuesFull(now.stage), now.parity);
    FenceMma();
    const uint64_t v_operand =
        TransposedOperand(Afresh<kHidden>(ring_.Values(now.stage)), Shape::kTileBlockBytes);
    // A split's first tile starts from +0, as 0 * alpha would.
    const bool accumulate = tile != first_tile_ && tile % Shape::kTilesOfSplit != 0;
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      Wgmma<kHeadDim>::template RegisterMma<true>(
          acc_, weights_[k], Further(v_operand, k * 16 * 128), accumulate || k != 0);
    }
    CommitMma();
    contract::FoldFactors factors[2];
    bool skipped[2];  // the row sees no key of the split
    if (split_ends) FinishSplit(factors, skipped);
    WaitMma<0>();
    Release(ring_.ValuesEmpty(now.stage));
    if (split_ends) Fold(factors, skipped);
  }

  __device__ __forceinline__ void FinishSplit(contract::FoldFactors (&factors)[2],
                                              bool (&skipped)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const contract::SplitSum split = softmax_.Finish(h, p_.scale);
      skipped[h] = split.max == contract::kMinusInfinity;
      if (!skipped[h]) factors[h] = contract::Fold(sum_[h], split);
    }
    softmax_.Reset();
  }

  __device__ __forceinline__ void Fold(const contract::FoldFactors (&factors)[2],
                                       const bool (&skipped)[2]) {
    if (__builtin_expect(__any_sync(kAllLanes, skipped[0] || skipped[1]), 0)) {
      FoldInto([&](float x, int i) {
        const int h = i / 2 % 2;
        return skipped[h] ? x : contract::FoldAccumulator(x, acc_[i], factors[h]);
      });
    } else {
      FoldInto([&](float x, int i) {
        return contract::FoldAccumulator(x, acc_[i], factors[i / 2 % 2]);
      });
    }
  }
  // Each total number i becomes fold_one(total, i).
  template <typename FoldOne>
  __device__ __forceinline__ void FoldInto(FoldOne fold_one) {
#pragma unroll
    for (int i = 0; i < kSharedTotals; i += 16) {
      float4 x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = SharedTotals()[(i / 4 + j) * 128];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int e = i + 4 * j;
        x[j] = {fold_one(x[j].x, e), fold_one(x[j].y, e + 1), fold_one(x[j].z, e + 2),
                fold_one(x[j].w, e + 3)};
        SharedTotals()[(i / 4 + j) * 128] = x[j];
      }
    }
#pragma unroll
    for (int i = kSharedTotals; i < kAccumulators; ++i) {
      total_[i - kSharedTotals] = fold_one(total_[i - kSharedTotals], i);
    }
  }

  // The output passes through q's shared memory, which has been read.
  __device__ __forceinline__ void StoreRows() {
    const float inverse[2] = {contract::Div(1.0f, sum_[0].sum), contract::Div(1.0f, sum_[1].sum)};
#pragma unroll
    for (int i = 0; i < kAccumulators; i += 4) {
      float4 x;
      if (i < kSharedTotals) {
        x = SharedTotals()[i / 4 * 128];
      } else {
        const float* y = total_ + i - kSharedTotals;
        x = {y[0], y[1], y[2], y[3]};
      }
      const int r = thread_ / 32 * 16 + lane_ / 4;
      uint8_t* const to = Queries() + i / 32 * Shape::kQueryBlockBytes + r * 128 +
                          ((i / 4 % 8) ^ (r % 8)) * 16 + lane_ % 4 * 4;
      using contract::Mul;
      *reinterpret_cast<uint32_t*>(to) = PackBf16(Mul(x.x, inverse[0]), Mul(x.y, inverse[0]));
      *reinterpret_cast<uint32_t*>(to + 8 * 128) =
          PackBf16(Mul(x.z, inverse[1]), Mul(x.w, inverse[1]));
    }
    if (kSource == KvSource::kRows && lane_ % 4 == 0) StoreLogSums();
    SyncThreads(1 + consumer_, 128);
    ForEachChunk<Shape, kHeadDim, kSource>(
        p_, work_, consumer_, [&](bool valid, int64_t row, int column, int offset) {
          if (!valid) return;
          Bf16* to = p_.out + row * p_.ldo + column;
          if (p_.out_vectors) {
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(Queries() + offset);
          } else {
            for (int i = 0; i < 8; ++i)
              to[i] = reinterpret_cast<const Bf16*>(Queries() + offset)[i];
          }
        });
  }

  __device__ __forceinline__ void StoreLogSums() {
    for (int h = 0; h < 2; ++h) {
      const int pair = first_pair_ + thread_ / 32 * 16 + lane_ / 4 + 8 * h;
      if (pair >= work_.end_pair) continue;
      const int64_t head = work_.kv_head * p_.heads_per_kv + pair % p_.heads_per_kv;
      p_.log_sums[head * p_.rows + work_.first_row + pair / p_.heads_per_kv] =
          contract::LogSumExp2(sum_[h].max, sum_[h].sum);
    }
  }

  const PrefillParams& p_;
  const PrefillBlock work_;
  const PrefillRing<Shape> ring_;
  const int consumer_;
  const int thread_;  // of the warpgroup
  const int lane_;
  const int first_pair_;
  uint8_t* const shared_;
  RingCursor<Shape> cursor_;
  int position_[2];
  // The tiles with a key that the warpgroup's rows see. The block's other tiles are skipped.
  int first_tile_;
  int end_tile_;
  // Every row sees all keys of the tiles [full_tile_, full_end_tile_).
  int full_tile_;
  int full_end_tile_;
  SoftmaxFragment softmax_;
  contract::SplitSum sum_[2] = {{contract::kMinusInfinity, 0.0f}, {contract::kMinusInfinity, 0.0f}};
  float scores_[kTile / 2];
  uint32_t weights_[kTile / 16][4];
  float alpha_[2];
  float acc_[kAccumulators];
  float total_[Shape::kRegisterTotals + 1] = {};
};

template <int kHeadDim, KvSource kSource>
__global__ void __launch_bounds__(PrefillShape<kHeadDim>::kThreads, 1)
    PrefillKernel(const __grid_constant__ PrefillParams p) {
  using Shape = PrefillShape<kHeadDim>;
  constexpr bool kGather = kSource == KvSource::kGather;
  extern __shared__ __align__(1024) uint8_t shared[];
  const PrefillRing<Shape> ring = {SharedAddress(shared)};
  const int warpgroup = Uniform(static_cast<int>(threadIdx.x) / 128);

  WaitForPredecessor();
  ReleaseSuccessor();
  PrefillBlock work;
  if (!FindWork<Shape, kSource>(p, &work)) return;
  const int consumers = (work.end_pair - work.first_pair + 63) / 64;  // those that have a row
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      InitBarrier(ring.KeysFull(stage), kGather ? 128 : 1);
      InitBarrier(ring.ValuesFull(stage), kGather ? 128 : 1);
      InitBarrier(ring.KeysEmpty(stage), 4 * consumers);
      InitBarrier(ring.ValuesEmpty(stage), 4 * consumers);
    }
    InitBarrier(ring.ValuesLanded(), 1);
    FenceBarrierInit();
  }
  __syncthreads();

  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Shape::kProducerRegisters));
    if (kGather) {
      GatherTiles<Shape, kHeadDim>(p, work, ring);
    } else if (threadIdx.x < 32) {
      CopyTiles<Shape, false, kSource>(p, work, ring);
    } else if (threadIdx.x < 64) {
      CopyTiles<Shape, true, kSource>(p, work, ring);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Shape::kConsumerRegisters));
    if (warpgroup <= consumers) {
      PrefillConsumer<Shape, kHeadDim, kSource>(p, work, ring, shared, warpgroup - 1).Run();
    }
  }
}

// Launches the schedule for one head size.
template <int kHeadDim, KvSource kSource>
absl::Status LaunchPrefillFrom(const PrefillParams& params, const Stream& stream) {
  using Shape = PrefillShape<kHeadDim>;
  // An upper bound: full blocks, and one more for the end of each sequence.
  const int64_t pairs = int64_t{params.sequences.num_rows} * params.heads_per_kv;
  const int64_t blocks = (pairs / Shape::kRows + params.sequences.num_sequences) * params.kv_heads;
  const Grid grid = {.blocks = dim3(static_cast<unsigned>(blocks)),
                     .threads = dim3(Shape::kThreads),
                     .shared_bytes = Shape::kSharedBytes};
  return Launch(PrefillKernel<kHeadDim, kSource>, grid, stream, params);
}

// For serving; instantiated in prefill_<head size>.cu.
template <int kHeadDim>
absl::Status LaunchPrefill(const PrefillParams& params, const Stream& stream) {
  return params.box_rows == 0 ? LaunchPrefillFrom<kHeadDim, KvSource::kGather>(params, stream)
                              : LaunchPrefillFrom<kHeadDim, KvSource::kBoxes>(params, stream);
}
extern template absl::Status LaunchPrefill<64>(const PrefillParams&, const Stream&);
extern template absl::Status LaunchPrefill<96>(const PrefillParams&, const Stream&);
extern template absl::Status LaunchPrefill<128>(const PrefillParams&, const Stream&);
extern template absl::Status LaunchPrefill<256>(const PrefillParams&, const Stream&);

// For training; instantiated in training_<head size>.cu.
template <int kHeadDim>
absl::Status LaunchTrainingPrefill(const PrefillParams& params, const Stream& stream) {
  return LaunchPrefillFrom<kHeadDim, KvSource::kRows>(params, stream);
}
extern template absl::Status LaunchTrainingPrefill<64>(const PrefillParams&, const Stream&);
extern template absl::Status LaunchTrainingPrefill<96>(const PrefillParams&, const Stream&);
extern template absl::Status LaunchTrainingPrefill<128>(const PrefillParams&, const Stream&);
extern template absl::Status LaunchTrainingPrefill<256>(const PrefillParams&, const Stream&);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_ATTENTION_PREFILL_CUH_
