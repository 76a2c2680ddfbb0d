// The kernel behind LaunchPrefillAttention and Run, for one head size.
//
// A block takes 64 rows for each consumer warpgroup, all of one sequence and one KV head. A row is
// a pair of a token and a query head of that KV head, tokens outermost. One more warpgroup copies
// tiles of keys and values into a ring buffer (prefill_ring.cuh). A consumer keeps its scores and
// the current split's accumulators in registers, and the folded result of earlier splits in shared
// memory. While one consumer computes its softmax, others use the tensor cores.
#ifndef ISOBIT_KERNELS_CUDA_SM90_ATTENTION_PREFILL_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_ATTENTION_PREFILL_CUH_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/contract/attention.h"
#include "kernels/contract/gradients.h"
#include "kernels/contract/portable.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/cuda/sm90/attention/prefill_ring.cuh"
#include "kernels/cuda/sm90/attention/softmax_fragment.cuh"
#include "kernels/cuda/sm90/device/barrier.cuh"
#include "kernels/cuda/sm90/device/wgmma.cuh"

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

// One consumer warpgroup: computes 64 rows from start to end.
template <class Shape, int kHeadDim, KvSource kSource>
__device__ __forceinline__ void Consume(const PrefillParams& p, const PrefillBlock& work,
                                        const PrefillRing<Shape>& ring, uint8_t* shared,
                                        int consumer) {
  constexpr int kTile = Shape::kTile;
  constexpr int kAccumulators = Shape::kAccumulators;
  constexpr int kSharedTotals = Shape::kSharedTotals;
  constexpr bool kHidden = Shape::kRegisterTotals > 0;
  const int thread = static_cast<int>(threadIdx.x % 128);
  const int lane = thread % 32;
  uint8_t* const q_bytes = shared + consumer * Shape::kQueryBytes;
  const auto release = [&](uint32_t barrier) {
    if (lane == 0) Arrive(barrier);
  };
  RingCursor<Shape> cursor;
  const auto pass_over = [&](int tiles) {
    for (int i = 0; i < tiles; ++i, cursor.Advance()) {
      WaitBarrier(ring.KeysFull(cursor.stage), cursor.parity);
      release(ring.KeysEmpty(cursor.stage));
      WaitBarrier(ring.ValuesFull(cursor.stage), cursor.parity);
      release(ring.ValuesEmpty(cursor.stage));
    }
  };
  const int first_pair = work.first_pair + consumer * 64;
  ForEachChunk<Shape, kHeadDim, kSource>(
      p, work, consumer, [&](bool valid, int64_t row, int column, int offset) {
        const Bf16* from = p.q + row * p.ldq + column;
        uint4 data = {0, 0, 0, 0};
        if (valid && p.q_vectors) {
          data = *reinterpret_cast<const uint4*>(from);
        } else if (valid) {
          uint32_t* words = &data.x;
          for (int i = 0; i < 4; ++i) words[i] = from[2 * i] | uint32_t{from[2 * i + 1]} << 16;
        }
        *reinterpret_cast<uint4*>(q_bytes + offset) = data;
      });
  float4* const shared_total =
      reinterpret_cast<float4*>(shared + Shape::kTotals + consumer * Shape::kTotalBytes) + thread;
  for (int i = 0; i < kSharedTotals / 4; ++i) shared_total[i * 128] = {0.0f, 0.0f, 0.0f, 0.0f};
  FenceSharedForAsync();
  SyncThreads(1 + consumer, 128);

  const int last_pair = min(work.end_pair, first_pair + 64) - 1;
  const int first_position = work.PositionOf(first_pair, p.heads_per_kv);
  const int last_position = work.PositionOf(last_pair, p.heads_per_kv);
  int position[2];
  for (int h = 0; h < 2; ++h) {
    position[h] = work.PositionOf(min(last_pair, first_pair + thread / 32 * 16 + lane / 4 + 8 * h),
                                  p.heads_per_kv);
  }

  // The tiles with a key that these rows see. The block's other tiles are skipped.
  const int first_tile = Uniform(p.window == 0 ? 0 : max(0, first_position - p.window + 1) / kTile);
  const int end_tile = Uniform(last_position / kTile + 1);
  // Every row sees all keys of the tiles [full_tile, full_end_tile).
  const int full_tile =
      Uniform(p.window == 0 ? 0 : max(0, last_position - p.window + kTile) / kTile);
  const int full_end_tile = Uniform((first_position + 1) / kTile);
  pass_over(first_tile - Uniform(work.first_tile));

  SoftmaxFragment softmax;
  softmax.Reset();
  contract::SplitSum sum[2] = {{contract::kMinusInfinity, 0.0f}, {contract::kMinusInfinity, 0.0f}};
  float scores[kTile / 2];
  uint32_t weights[kTile / 16][4];
  float alpha[2];
  float acc[kAccumulators];
  float total[Shape::kRegisterTotals + 1] = {};

  const auto multiply_keys = [&](int stage) {
    const uint64_t q_operand =
        KMajorOperand(Afresh<kHidden>(ring.base + consumer * Shape::kQueryBytes));
    const uint64_t k_operand = KMajorOperand(Afresh<kHidden>(ring.Keys(stage)));
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      const int step = k % 4 * 32;  // bytes of 16 columns
      Wgmma<kTile>::Mma(scores, Further(q_operand, k / 4 * Shape::kQueryBlockBytes + step),
                        Further(k_operand, k / 4 * Shape::kTileBlockBytes + step), k != 0);
    }
    CommitMma();
  };
  const auto multiply_values = [&](int stage, int tile) {
    const uint64_t v_operand =
        TransposedOperand(Afresh<kHidden>(ring.Values(stage)), Shape::kTileBlockBytes);
    // A split's first tile starts from +0, as 0 * alpha would.
    const bool accumulate = tile != first_tile && tile % Shape::kTilesOfSplit != 0;
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      Wgmma<kHeadDim>::template RegisterMma<true>(acc, weights[k], Further(v_operand, k * 16 * 128),
                                                  accumulate || k != 0);
    }
    CommitMma();
  };
  const auto weigh = [&](int tile) {
    const int first_key = tile * kTile;
    float shift_of_none[2] = {contract::kMinusInfinity, contract::kMinusInfinity};
    if (__builtin_expect(tile < full_tile || tile >= full_end_tile, 0)) {
      SeenKeys seen;
      for (int h = 0; h < 2; ++h) {
        seen.upto[h] = position[h] - first_key;
        seen.after[h] = p.window == 0 ? -1 : seen.upto[h] - p.window;
        if (!seen.Any(h, kTile)) shift_of_none[h] = 0.0f;
      }
      SoftmaxFragment::Mask<kTile>(scores, seen);
    }
    softmax.Update<kTile>(scores, p.scale, shift_of_none, alpha);
  };
  contract::FoldFactors factors[2];
  bool skipped[2];  // the row sees no key of the split
  const auto finish_split = [&] {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const contract::SplitSum split = softmax.Finish(h, p.scale);
      skipped[h] = split.max == contract::kMinusInfinity;
      if (!skipped[h]) factors[h] = contract::Fold(sum[h], split);
    }
    softmax.Reset();
  };
  const auto fold_into = [&](auto fold_one) {
#pragma unroll
    for (int i = 0; i < kSharedTotals; i += 16) {
      float4 x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = shared_total[(i / 4 + j) * 128];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int e = i + 4 * j;
        x[j] = {fold_one(x[j].x, e), fold_one(x[j].y, e + 1), fold_one(x[j].z, e + 2),
                fold_one(x[j].w, e + 3)};
        shared_total[(i / 4 + j) * 128] = x[j];
      }
    }
#pragma unroll
    for (int i = kSharedTotals; i < kAccumulators; ++i) {
      total[i - kSharedTotals] = fold_one(total[i - kSharedTotals], i);
    }
  };
  const auto fold = [&] {
    if (__builtin_expect(__any_sync(kAllLanes, skipped[0] || skipped[1]), 0)) {
      fold_into([&](float x, int i) {
        const int h = i / 2 % 2;
        return skipped[h] ? x : contract::FoldAccumulator(x, acc[i], factors[h]);
      });
    } else {
      fold_into(
          [&](float x, int i) { return contract::FoldAccumulator(x, acc[i], factors[i / 2 % 2]); });
    }
  };

  WaitBarrier(ring.KeysFull(cursor.stage), cursor.parity);
  FenceMma();
  multiply_keys(cursor.stage);
  WaitMma<0>();
  release(ring.KeysEmpty(cursor.stage));
  weigh(first_tile);
  SoftmaxFragment::Pack<kTile>(scores, weights);
  for (int tile = first_tile; tile + 1 < end_tile; ++tile) {
    const RingCursor<Shape> now = cursor;
    cursor.Advance();
    const bool split_ends = (tile + 1) % Shape::kTilesOfSplit == 0;
    WaitBarrier(ring.ValuesFull(now.stage), now.parity);
    FenceMma();
    multiply_values(now.stage, tile);
    if (split_ends) finish_split();
    WaitMma<0>();
    release(ring.ValuesEmpty(now.stage));
    if (split_ends) fold();
    WaitBarrier(ring.KeysFull(cursor.stage), cursor.parity);
    FenceMma();
    multiply_keys(cursor.stage);
    WaitMma<0>();
    release(ring.KeysEmpty(cursor.stage));
    weigh(tile + 1);
    if (!split_ends) {
#pragma unroll
      for (int i = 0; i < kAccumulators; ++i) acc[i] = contract::Mul(acc[i], alpha[i / 2 % 2]);
    }
    SoftmaxFragment::Pack<kTile>(scores, weights);
  }
  WaitBarrier(ring.ValuesFull(cursor.stage), cursor.parity);
  FenceMma();
  multiply_values(cursor.stage, end_tile - 1);
  finish_split();
  WaitMma<0>();
  release(ring.ValuesEmpty(cursor.stage));
  cursor.Advance();
  fold();
  pass_over(work.end_tile - end_tile);

  // The output overwrites q in shared memory, which has been read.
  const float inverse[2] = {contract::Div(1.0f, sum[0].sum), contract::Div(1.0f, sum[1].sum)};
#pragma unroll
  for (int i = 0; i < kAccumulators; i += 4) {
    float4 x;
    if (i < kSharedTotals) {
      x = shared_total[i / 4 * 128];
    } else {
      const float* y = total + i - kSharedTotals;
      x = {y[0], y[1], y[2], y[3]};
    }
    const int r = thread / 32 * 16 + lane / 4;
    uint8_t* const to = q_bytes + i / 32 * Shape::kQueryBlockBytes + r * 128 +
                        ((i / 4 % 8) ^ (r % 8)) * 16 + lane % 4 * 4;
    using contract::Mul;
    *reinterpret_cast<uint32_t*>(to) = PackBf16(Mul(x.x, inverse[0]), Mul(x.y, inverse[0]));
    *reinterpret_cast<uint32_t*>(to + 8 * 128) =
        PackBf16(Mul(x.z, inverse[1]), Mul(x.w, inverse[1]));
  }
  if (kSource == KvSource::kRows && lane % 4 == 0) {
    for (int h = 0; h < 2; ++h) {
      const int pair = first_pair + thread / 32 * 16 + lane / 4 + 8 * h;
      if (pair >= work.end_pair) continue;
      const int64_t head = work.kv_head * p.heads_per_kv + pair % p.heads_per_kv;
      p.log_sums[head * p.rows + work.first_row + pair / p.heads_per_kv] =
          contract::LogSumExp2(sum[h].max, sum[h].sum);
    }
  }
  SyncThreads(1 + consumer, 128);
  ForEachChunk<Shape, kHeadDim, kSource>(
      p, work, consumer, [&](bool valid, int64_t row, int column, int offset) {
        if (!valid) return;
        Bf16* to = p.out + row * p.ldo + column;
        if (p.out_vectors) {
          *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(q_bytes + offset);
        } else {
          for (int i = 0; i < 8; ++i) to[i] = reinterpret_cast<const Bf16*>(q_bytes + offset)[i];
        }
      });
}

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
      Consume<Shape, kHeadDim, kSource>(p, work, ring, shared, warpgroup - 1);
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

#endif  // ISOBIT_KERNELS_CUDA_SM90_ATTENTION_PREFILL_CUH_
