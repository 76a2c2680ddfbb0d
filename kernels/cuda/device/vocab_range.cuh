// One range of a row of logits (C7) in a block's shared memory: loading it, turning logits into
// processed ones, summing weights and drawing a token. Not here: what joins ranges to a row.
#ifndef ISOBIT_KERNELS_CUDA_DEVICE_VOCAB_RANGE_CUH_
#define ISOBIT_KERNELS_CUDA_DEVICE_VOCAB_RANGE_CUH_

#include <cstdint>

#include "kernels/contract/log_prob.h"
#include "kernels/contract/noise.h"
#include "kernels/contract/sampling.h"
#include "kernels/cuda/device/barrier.cuh"
#include "kernels/cuda/device/bulk_copy.cuh"
#include "kernels/cuda/log_probs.h"

namespace isobit::cuda {

using contract::kMinusInfinity;

inline constexpr int kRangeThreads = 512;
inline constexpr int kRangeWarps = kRangeThreads / 32;
// Logits that arrive together: one 16-byte load of every thread.
inline constexpr int kChunk = 4 * kRangeThreads;
inline constexpr int kMaxChunks =
    (static_cast<int>(kMaxDeviceVocab) / 8 + 16 + kChunk - 1) / kChunk;

struct VocabRange {
  float* z = nullptr;  // [size], shared memory, 16-byte aligned
  int32_t size = 0;
  int32_t first = 0;  // id of z[0], a multiple of 16

  __device__ bool Holds(int32_t id) const { return id >= first && id < first + size; }
};

// What a range tells its row.
struct RangeResult {
  contract::VocabSum sum;  // of the distribution that logprobs refer to
  float target_logit = 0;  // of the row's target, if it lies in this range
  uint64_t best = 0;       // TokenKey of the largest value (logit plus noise); 0: none
  float best_logit = 0;
  bool unfit = false;  // a logit is not fit to be in a distribution
  bool alive = false;  // a processed logit is above -inf
};

// What the threads of a block share while they work on a range.
struct RangeScratch {
  uint64_t barriers[kMaxChunks];  // one a chunk
  uint32_t words[kRangeWarps];
  uint64_t weights[kRangeWarps];
  uint64_t distances[kRangeWarps];
  unsigned long long best;
  float prune;
};

// Keys order tokens as contract::Before does: a larger key comes first. -0 ties with +0.
__device__ __forceinline__ uint32_t AscendingBits(float x) {
  const uint32_t bits = contract::BitsOf(contract::Add(x, 0.0f));
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float FromAscendingBits(uint32_t bits) {
  return contract::FromBits((bits >> 31) != 0 ? bits & 0x7fffffffu : ~bits);
}
__device__ __forceinline__ uint64_t TokenKey(float logit, int32_t id) {
  return uint64_t{AscendingBits(logit)} << 32 | ~static_cast<uint32_t>(id);
}
__device__ __forceinline__ float LogitOf(uint64_t key) {
  return FromAscendingBits(static_cast<uint32_t>(key >> 32));
}
__device__ __forceinline__ int32_t IdOf(uint64_t key) {
  return static_cast<int32_t>(~static_cast<uint32_t>(key));
}

// ---- Reductions over the block, for every thread

__device__ __forceinline__ uint32_t BlockMax(uint32_t value, RangeScratch& scratch) {
  value = __reduce_max_sync(~0u, value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch.words[threadIdx.x / 32] = value;
  __syncthreads();
  return __reduce_max_sync(~0u, scratch.words[threadIdx.x % kRangeWarps]);
}
__device__ __forceinline__ float BlockMax(float value, RangeScratch& scratch) {
  return FromAscendingBits(BlockMax(AscendingBits(value), scratch));
}

// ---- Loading

// Begins to copy a range into shared memory; all threads call it. Chunk c has arrived when barrier
// c has completed its first phase.
__device__ __forceinline__ void StartLoading(const VocabRange& range, const float* logits,
                                             RangeScratch& scratch) {
  const float* from = logits + range.first;
  const int chunks = (range.size + kChunk - 1) / kChunk;
  const auto in_bulk = [&](int chunk) {
    const int size = min(kChunk, range.size - chunk * kChunk);
    return reinterpret_cast<uintptr_t>(from) % 16 == 0 && size % 4 == 0;
  };
  if (threadIdx.x < chunks) {
    InitBarrier(SharedAddress(&scratch.barriers[threadIdx.x]),
                in_bulk(static_cast<int>(threadIdx.x)) ? 1 : kRangeThreads);
    FenceBarrierInit();
  }
  __syncthreads();
  for (int c = 0; c < chunks; ++c) {
    const int begin = c * kChunk;
    const int size = min(kChunk, range.size - begin);
    const uint32_t barrier = SharedAddress(&scratch.barriers[c]);
    if (in_bulk(c)) {
      if (threadIdx.x != 0) continue;
      ExpectBytes(barrier, static_cast<uint32_t>(size) * sizeof(float));
      CopyBytes(SharedAddress(range.z + begin), from + begin,
                static_cast<uint32_t>(size) * sizeof(float), barrier, kEvictFirst);
      continue;
    }
    for (int i = static_cast<int>(threadIdx.x); i < size; i += kRangeThreads) {
      asm volatile(
          "cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(SharedAddress(range.z + begin + i)),
          "l"(from + begin + i)
          : "memory");
    }
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
  }
}

// Four logits from a multiple of 4; -inf beyond the range.
struct Four {
  float z[4];
};
__device__ __forceinline__ Four LoadFour(const VocabRange& range, int i) {
  if (i + 4 <= range.size) {
    const float4 v = *reinterpret_cast<const float4*>(range.z + i);
    return {{v.x, v.y, v.z, v.w}};
  }
  Four four;
#pragma unroll
  for (int j = 0; j < 4; ++j) four.z[j] = i + j < range.size ? range.z[i + j] : kMinusInfinity;
  return four;
}

// Calls visit(i) for the multiples of 4 that are this thread's, so that a thread always meets the
// same tokens. A warp whose first token is beyond the range has none.
template <typename Visit>
__device__ __forceinline__ void ForEachFour(const VocabRange& range, Visit visit) {
  for (int base = static_cast<int>(threadIdx.x / 32 * 128); base < range.size; base += kChunk) {
    visit(base + static_cast<int>(threadIdx.x % 32 * 4));
  }
}

struct RangeMax {
  float max;
  bool unfit;  // NaN or +inf is among the logits, or -inf if it must not be
};

// Waits for the logits; the maximum of all, none of which may be infinite.
__device__ __forceinline__ RangeMax AwaitRaw(const VocabRange& range, RangeScratch& scratch) {
  float max = kMinusInfinity;
  float zero = 0.0f;  // NaN as soon as a logit is not finite
  for (int base = 0, c = 0; base < range.size; base += kChunk, ++c) {
    WaitBarrier(SharedAddress(&scratch.barriers[c]), 0);
    const int i = base + static_cast<int>(threadIdx.x) * 4;
    if (i + 4 <= range.size) {
      const Four four = LoadFour(range, i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        max = fmaxf(max, four.z[j]);
        zero = contract::Fma(four.z[j], 0.0f, zero);
      }
    } else {
      for (int k = i; k < range.size; ++k) {
        max = fmaxf(max, range.z[k]);
        zero = contract::Fma(range.z[k], 0.0f, zero);
      }
    }
  }
  const bool unfit = __syncthreads_or(static_cast<int>(zero != zero)) != 0;
  return {BlockMax(max, scratch), unfit};
}

// ---- From logits to processed ones

// Penalties, bias, bans and temperature, in place.
__device__ __forceinline__ RangeMax Process(const VocabRange& range, const DeviceLogProbRow& row,
                                            const DeviceLogProbs& args, float inverse_temperature,
                                            RangeScratch& scratch) {
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < row.counts.size; i += kRangeThreads) {
    const TokenCount c = args.counts[row.counts.first + i];
    if (!range.Holds(c.id)) continue;
    float& z = range.z[c.id - range.first];
    z = contract::Penalise(z, c.in_prompt, c.in_output, row.repetition_penalty,
                           row.presence_penalty, row.frequency_penalty);
  }
  __syncthreads();
  for (int i = thread; i < row.biases.size; i += kRangeThreads) {
    const TokenBias b = args.biases[row.biases.first + i];
    if (!range.Holds(b.id)) continue;
    float& z = range.z[b.id - range.first];
    z = contract::Add(z, b.bias);
  }
  __syncthreads();
  for (int i = thread; i < row.banned.size; i += kRangeThreads) {
    const int32_t id = args.banned[row.banned.first + i];
    if (range.Holds(id)) range.z[id - range.first] = kMinusInfinity;
  }
  __syncthreads();
  float max = kMinusInfinity;
  bool unfit = false;
  for (int i = thread; i < range.size; i += kRangeThreads) {
    const float z = contract::Mul(range.z[i], inverse_temperature);
    range.z[i] = z;
    unfit |= !(z < -kMinusInfinity);
    max = fmaxf(max, z);
  }
  unfit = __syncthreads_or(static_cast<int>(unfit)) != 0;
  return {BlockMax(max, scratch), unfit};
}

// ---- Weights and the draw

// A sum of numbers in [0, 1], each truncated to 40 fraction bits: two rounding-towards-zero
// additions leave 20 bits each in the low bits of a float, which saves the conversions.
class FractionSum {
 public:
  __device__ void Add(float x) {
    const float high = __fadd_rz(x, kHigh);
    const float rest = contract::Sub(x, contract::Sub(high, kHigh));
    const float low = __fadd_rz(rest, kLow);
    high_ += contract::BitsOf(high) - contract::BitsOf(kHigh);
    low_ += contract::BitsOf(low) - contract::BitsOf(kLow);
  }
  // Of a warp's sums, for its first lane. Neither half can overflow: a warp holds fewer than 2^12
  // numbers of a range.
  __device__ uint64_t OfWarp() const {
    return (uint64_t{__reduce_add_sync(~0u, high_)} << 20) + __reduce_add_sync(~0u, low_);
  }

 private:
  static constexpr float kHigh = 8.0f;     // its floats' last bit weighs 2^-20
  static constexpr float kLow = 0x1p-17f;  // 2^-40
  uint32_t high_ = 0;
  uint32_t low_ = 0;
};
static_assert(kMaxChunks * 4 * 32 < 4096);

enum class DrawRule { kNone, kGreedy, kGumbel };

// The noise of a row.
struct NoiseKey {
  uint64_t seed;
  uint32_t sample;
  uint32_t position;
};

// A token can reach the value `best` only if its noise is at least best - z, hence if
// u <= exp(z - best) = w * exp(max - best), w being its weight against `max`. This is that factor,
// enlarged by far more than all roundings on the way can move a value.
__device__ __forceinline__ float PruneFactor(float max, float best) {
  const float slack = contract::Fma(fabsf(best), 0x1p-22f, 0x1p-10f);
  return contract::Exp2(
      contract::Mul(contract::Add(contract::Sub(max, best), slack), contract::kLog2E));
}

// No value of the noise is smaller.
__device__ __forceinline__ float LeastGumbel() { return contract::Gumbel(0xffffffffu); }

// Raises scratch.best to the largest of the values of this warp's candidates among four tokens
// each.
__device__ __forceinline__ void DrawAmong(const Four& z, const contract::PhiloxBlock& noise,
                                          const bool (&candidate)[4], int32_t id, float max,
                                          RangeScratch& scratch) {
  uint64_t best = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (!candidate[j]) continue;
    const float value = contract::Add(z.z[j], contract::Gumbel(noise.words[j]));
    const uint64_t key = TokenKey(value, id + j);
    best = key > best ? key : best;
  }
  const uint32_t value = static_cast<uint32_t>(best >> 32);
  if (value != __reduce_max_sync(__activemask(), value)) return;
  if (best <= *const_cast<volatile unsigned long long*>(&scratch.best)) return;
  atomicMax(&scratch.best, static_cast<unsigned long long>(best));
  atomicMin(reinterpret_cast<int*>(&scratch.prune),
            static_cast<int>(contract::BitsOf(PruneFactor(max, LogitOf(best)))));
}

// The sums of weights and of weighted distances (in absolute value) against `max`, which is not
// -inf, of the logits times inverse_temperature, and the key of the drawn token's value. The result
// is thread 0's.
struct RangeTotals {
  uint64_t weights;
  uint64_t distances;
  uint64_t best;
};
template <DrawRule kRule, bool kDistances>
__device__ __forceinline__ RangeTotals SumAndDraw(const VocabRange& range,
                                                  float inverse_temperature, float max,
                                                  const NoiseKey& noise_key,
                                                  RangeScratch& scratch) {
  __syncthreads();
  if (threadIdx.x == 0) {
    scratch.best = 0;
    scratch.prune = PruneFactor(max, contract::Add(max, LeastGumbel()));
  }
  __syncthreads();
  FractionSum weights;
  FractionSum distances;
  uint64_t greedy = 0;
  ForEachFour(range, [&](int i) {
    Four four = LoadFour(range, i);
    float weight[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      four.z[j] = contract::Mul(four.z[j], inverse_temperature);
      weight[j] = contract::ExpDistance(four.z[j], max);
      weights.Add(weight[j]);
      if constexpr (kDistances) {
        const float distance = contract::Sub(max, four.z[j]);
        distances.Add(weight[j] > 0.0f ? contract::Mul(weight[j], distance) : 0.0f);
      }
    }
    const int32_t id = range.first + i;
    if constexpr (kRule == DrawRule::kGreedy) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (four.z[j] != max) continue;
        const uint64_t key = TokenKey(four.z[j], id + j);
        greedy = key > greedy ? key : greedy;
      }
    }
    if constexpr (kRule == DrawRule::kGumbel) {
      const contract::PhiloxBlock noise = contract::TokenNoise(
          noise_key.seed, noise_key.sample, noise_key.position, static_cast<uint32_t>(id) / 4);
      const float prune = *const_cast<volatile float*>(&scratch.prune);
      bool candidate[4];
      bool any = false;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // 1 + u, cut to 23 fraction bits, against 1 + the bound: neither rounding can turn a
        // candidate away.
        const float u = contract::FromBits(0x3f800000u | noise.words[j] >> 9);
        candidate[j] = !(u > contract::Fma(weight[j], prune, 1.0f)) && four.z[j] > kMinusInfinity;
        any |= candidate[j];
      }
      if (any) DrawAmong(four, noise, candidate, id, max, scratch);
    }
  });
  const uint64_t weight_sum = weights.OfWarp();
  const uint64_t distance_sum = kDistances ? distances.OfWarp() : 0;
  if (kRule == DrawRule::kGreedy && greedy != 0) {
    atomicMax(&scratch.best, static_cast<unsigned long long>(greedy));
  }
  if (threadIdx.x % 32 == 0) {
    scratch.weights[threadIdx.x / 32] = weight_sum;
    scratch.distances[threadIdx.x / 32] = distance_sum;
  }
  __syncthreads();
  RangeTotals totals{0, 0, scratch.best};
  if (threadIdx.x == 0) {
#pragma unroll
    for (int w = 0; w < kRangeWarps; ++w) {
      totals.weights += scratch.weights[w];
      totals.distances += scratch.distances[w];
    }
  }
  return totals;
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_DEVICE_VOCAB_RANGE_CUH_
