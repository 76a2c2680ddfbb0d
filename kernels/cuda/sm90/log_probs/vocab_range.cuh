// One range of a row of logits (C7) in a block's shared memory: loading it, processing its logits,
// summing weights and drawing a token. Not here: joining a row's ranges.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LOG_PROBS_VOCAB_RANGE_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_LOG_PROBS_VOCAB_RANGE_CUH_

#include <cstdint>

#include "kernels/contract/log_prob.h"
#include "kernels/contract/noise.h"
#include "kernels/contract/sampling.h"
#include "kernels/cuda/sm90/device/barrier.cuh"
#include "kernels/cuda/sm90/device/bulk_copy.cuh"
#include "kernels/cuda/sm90/log_probs/log_probs.h"
#include "kernels/ops/log_probs.h"

namespace isobit::cuda {

using contract::kMinusInfinity;

inline constexpr int kRangeThreads = 256;
inline constexpr int kRangeWarps = kRangeThreads / 32;
// Logits that arrive together: two 16-byte loads of every thread.
inline constexpr int kStride = 4 * kRangeThreads;
inline constexpr int kChunk = 2 * kStride;
inline constexpr int kMaxChunks =
    (static_cast<int>(kMaxDeviceVocab) / 8 + 16 + kChunk - 1) / kChunk;

// The chunks of a range are in a ring of slots in shared memory.
struct VocabRange {
  float* ring = nullptr;  // [slots, stride], 16-byte aligned
  int32_t stride = kChunk;
  int32_t slots = 0;  // at least the range's chunks
  int32_t first_slot = 0;
  uint32_t first_phase = 0;  // parity of that slot's barriers; flips where chunks wrap to slot 0
  int32_t size = 0;
  int32_t first = 0;  // the first id, a multiple of 16

  __device__ bool Holds(int32_t id) const { return id >= first && id < first + size; }
  __device__ bool Wraps(int chunk) const { return first_slot + chunk >= slots; }
  __device__ int SlotOf(int chunk) const { return first_slot + chunk - (Wraps(chunk) ? slots : 0); }
  __device__ uint32_t PhaseOf(int chunk) const { return first_phase ^ (Wraps(chunk) ? 1u : 0u); }
  __device__ float* Chunk(int chunk) const { return ring + SlotOf(chunk) * stride; }
  // The i-th logit. The ring also has room for those up to the next multiple of kChunk.
  __device__ float& At(int i) const { return Chunk(i / kChunk)[i % kChunk]; }
};

// The result of a range.
struct RangeResult {
  contract::VocabSum sum;  // of the distribution to which logprobs refer
  float target_logit = 0;  // the target's, if it is in this range
  uint64_t best = 0;       // TokenKey of the largest value (logit plus noise); 0: there is none
  float best_logit = 0;
  float raw_logit = 0;  // LaunchRangeResults: unprocessed logit of best or target, if needed
  bool unfit = false;   // a logit cannot be part of a distribution
  bool alive = false;   // a processed logit is above -inf
};

// The noise of a row. All tokens have the same Philox keys, so the keys of all rounds are kept in
// shared memory.
struct NoiseKey {
  uint64_t seed;
  uint32_t sample;
  uint32_t position;
};
struct alignas(16) RoundKeys {
  uint32_t words[2 * contract::kPhiloxRounds];

  // Called by threads t = 0, 1, ...; the first 2 * kPhiloxRounds are needed.
  __device__ void Set(uint64_t seed, uint32_t t) {
    if (t >= 2 * contract::kPhiloxRounds) return;
    words[t] = t % 2 == 0 ? static_cast<uint32_t>(seed) + t / 2 * 0x9e3779b9u
                          : static_cast<uint32_t>(seed >> 32) + t / 2 * 0xbb67ae85u;
  }
};

// The result of one warp's share of a range: the sums of weights and of weighted distances (as
// absolute values), and the drawn token.
struct WarpTotals {
  uint64_t weights = 0;
  uint64_t distances = 0;
  uint64_t best = 0;  // TokenKey of its value; 0: there is none
  float best_logit = 0.0f;
};

// What the threads of a block share while they process a range.
struct RangeScratch {
  RoundKeys keys;
  unsigned long long best;  // TokenKey of the largest value so far
  float prune;              // PruneFactor of that value
  uint32_t words[kRangeWarps];
  uint32_t flags[kRangeWarps];

  // Prepares a draw with this seed. Called by threads 0, 1, ... of at least one warp.
  __device__ void BeginDraw(uint64_t seed, uint32_t thread) {
    keys.Set(seed, thread);
    if (thread != 0) return;
    best = 0;
    prune = contract::kInfinity;
  }
};

// A barrier for the threads that process a range; a block may have other threads.
__device__ __forceinline__ void SyncRange() { SyncThreads(1, kRangeThreads); }

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

// A maximum, and whether a logit cannot be part of a distribution.
struct RangeMax {
  float max;
  bool unfit;
  float own = kMinusInfinity;  // the maximum of what this thread has read
};

// The maximum over all threads, for every thread. Prepares the scratch for a draw by `seed`.
__device__ __forceinline__ RangeMax BlockMax(const RangeMax& mine, uint64_t seed,
                                             RangeScratch& scratch) {
  const uint32_t word = __reduce_max_sync(~0u, AscendingBits(mine.max));
  const bool flag = __any_sync(~0u, mine.unfit) != 0;
  SyncRange();
  scratch.BeginDraw(seed, threadIdx.x);
  if (threadIdx.x % 32 == 0) {
    scratch.words[threadIdx.x / 32] = word;
    scratch.flags[threadIdx.x / 32] = flag ? 1 : 0;
  }
  SyncRange();
  const uint32_t max = __reduce_max_sync(~0u, scratch.words[threadIdx.x % kRangeWarps]);
  return {FromAscendingBits(max),
          __any_sync(~0u, scratch.flags[threadIdx.x % kRangeWarps] != 0) != 0, mine.max};
}

// ---- Loading

// Starts copying chunk `c` of a range into shared memory. Called by kThreads threads; this one is
// number `thread`. Each arrives once at `barrier`. A chunk beyond the range is empty.
template <int kThreads>
__device__ __forceinline__ void StartChunk(const VocabRange& range, const float* logits, int c,
                                           int thread, uint32_t barrier) {
  const float* from = logits + range.first + c * kChunk;
  float* to = range.Chunk(c);
  const int size = max(0, min(kChunk, range.size - c * kChunk));
  if (reinterpret_cast<uintptr_t>(from) % 16 == 0 && size % 4 == 0) {
    if (thread == 0 && size > 0) {
      const uint32_t bytes = static_cast<uint32_t>(size) * sizeof(float);
      ExpectBytes(barrier, bytes);
      CopyBytes(SharedAddress(to), from, bytes, barrier, kEvictFirst);
    } else {
      Arrive(barrier);
    }
    return;
  }
  for (int i = thread; i < size; i += kThreads) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(SharedAddress(to + i)),
                 "l"(from + i)
                 : "memory");
  }
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Four logits from a multiple of 4 inside the range; -inf beyond it.
struct Four {
  float z[4];
};
__device__ __forceinline__ Four LoadFour(const VocabRange& range, int i) {
  const float4 v = *reinterpret_cast<const float4*>(&range.At(i));
  return {{v.x, i + 1 < range.size ? v.y : kMinusInfinity,
           i + 2 < range.size ? v.z : kMinusInfinity, i + 3 < range.size ? v.w : kMinusInfinity}};
}

__device__ __forceinline__ void StoreFour(const VocabRange& range, int i, const Four& four) {
  if (i + 4 <= range.size) {
    *reinterpret_cast<float4*>(&range.At(i)) = {four.z[0], four.z[1], four.z[2], four.z[3]};
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (i + j < range.size) range.At(i + j) = four.z[j];
  }
}

// Calls visit(i, four, whole) for this thread's share of the range: four logits from i on; if not
// `whole`, those beyond the range are -inf. For each of `chunks` chunks, calls loaded(slot) with
// its slot once the chunk has been read.
template <int kUnroll = 1, typename Loaded, typename Visit>
__device__ __forceinline__ void ForEachFour(const VocabRange& range, int chunks, Loaded loaded,
                                            Visit visit) {
  const int mine = static_cast<int>(threadIdx.x) * 4;
  const int whole = range.size / kChunk;
  int slot = range.first_slot;
  const auto next = [&] { slot = slot + 1 == range.slots ? 0 : slot + 1; };
#pragma unroll kUnroll
  for (int c = 0; c < whole; ++c, next()) {
    const float* chunk = range.ring + slot * range.stride + mine;
    const float4 a = *reinterpret_cast<const float4*>(chunk);
    const float4 b = *reinterpret_cast<const float4*>(chunk + kStride);
    loaded(slot);
    visit(c * kChunk + mine, Four{{a.x, a.y, a.z, a.w}}, true);
    visit(c * kChunk + kStride + mine, Four{{b.x, b.y, b.z, b.w}}, true);
  }
#pragma unroll 1
  for (int i = whole * kChunk + mine; i < range.size; i += kStride) {
    visit(i, LoadFour(range, i), false);
  }
#pragma unroll 1
  for (int c = whole; c < chunks; ++c, next()) loaded(slot);
}
template <typename Visit>
__device__ __forceinline__ void ForEachFour(const VocabRange& range, Visit visit) {
  ForEachFour(
      range, 0, [](int) {}, [&](int i, const Four& four, bool) { visit(i, four); });
}

// The maximum of a thread's unprocessed logits. Unfit if one of them is not finite.
class LogitMax {
 public:
  // Adds four logits, of which only the first `n` exist; the others are -inf.
  __device__ __forceinline__ void Add(const Four& four, int n) {
    const float(&z)[4] = four.z;
    max_ = fmaxf(max_, fmaxf(fmaxf(z[0], z[1]), fmaxf(z[2], z[3])));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j < n) zeros_[j % 2] = contract::Fma(z[j], 0.0f, zeros_[j % 2]);
    }
  }
  __device__ RangeMax Get() const {
    const float zero = contract::Add(zeros_[0], zeros_[1]);
    return {max_, zero != zero};
  }

 private:
  float max_ = kMinusInfinity;
  float zeros_[2] = {};  // becomes NaN once a logit is not finite
};

__device__ __forceinline__ RangeMax MaxOfLogits(const VocabRange& range, uint64_t seed,
                                                RangeScratch& scratch) {
  LogitMax max;
  ForEachFour<2>(
      range, 0, [](int) {},
      [&](int i, const Four& four, bool whole) { max.Add(four, whole ? 4 : range.size - i); });
  return BlockMax(max.Get(), seed, scratch);
}

// ---- Processing logits

// Applies bias, bans, penalties and temperature, in place.
__device__ __forceinline__ RangeMax Process(const VocabRange& range, const DeviceLogProbRow& row,
                                            const DeviceLogProbs& args, float inverse_temperature,
                                            RangeScratch& scratch) {
  SyncRange();
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < row.biases.size; i += kRangeThreads) {
    const TokenBias b = args.biases[row.biases.first + i];
    if (!range.Holds(b.id)) continue;
    float& z = range.At(b.id - range.first);
    z = contract::Add(z, b.bias);
  }
  SyncRange();
  for (int i = thread; i < row.banned.size; i += kRangeThreads) {
    const int32_t id = args.banned[row.banned.first + i];
    if (range.Holds(id)) range.At(id - range.first) = kMinusInfinity;
  }
  SyncRange();
  for (int i = thread; i < row.counts.size; i += kRangeThreads) {
    const TokenCount c = args.counts[row.counts.first + i];
    if (!range.Holds(c.id)) continue;
    float& z = range.At(c.id - range.first);
    z = contract::Penalise(z, c.in_prompt, c.in_output, row.repetition_penalty,
                           row.presence_penalty, row.frequency_penalty);
  }
  SyncRange();
  float max = kMinusInfinity;
  bool unfit = false;
  ForEachFour(range, [&](int i, Four four) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      four.z[j] = contract::Mul(four.z[j], inverse_temperature);
      unfit |= i + j < range.size && !(four.z[j] < -kMinusInfinity);
      max = fmaxf(max, four.z[j]);
    }
    StoreFour(range, i, four);
  });
  FenceSharedForAsync();  // the copy engine may write here next
  return BlockMax({max, unfit}, row.seed, scratch);
}

// ---- Weights and the draw

// contract::ExpDistance(z, max) for z - max in [-45, 0]: the polynomial of contract::Exp2 without
// its range checks. Below -45, weights and weighted distances truncate to zero, as they do at -45,
// so the caller may clamp the distance. INVARIANT: WeightsEqualTheContract.
inline constexpr float kLeastDistance = -45.0f;
__device__ __forceinline__ float WeightAt(float distance) {
  constexpr float kMagic = 0x1.8p23f;
  const float x = contract::Mul(distance, contract::kLog2E);
  const float shifted = contract::Add(x, kMagic);
  const float f = contract::Sub(x, contract::Sub(shifted, kMagic));
  const float p = contract::Exp2OfFraction(f);
  // The shift moves round(x) into the exponent. No value here is small enough to underflow.
  return contract::FromBits(contract::BitsOf(p) + (contract::BitsOf(shifted) << 23));
}

// A sum of numbers in [0, 1], each truncated to 40 fraction bits. Kept in a double whose last bit
// has the value 2^-40, so an addition that rounds toward zero truncates.
class FractionSum {
 public:
  __device__ void Add(float x) {
    // The bits of x as a double. A subnormal or zero becomes another number, which also truncates
    // to zero.
    constexpr uint64_t kRebias = uint64_t{1023 - 127} << 52;
    uint64_t bits;
    asm("mad.wide.u32 %0, %1, %2, %3;"
        : "=l"(bits)
        : "r"(contract::BitsOf(x)), "r"(1u << 29), "l"(kRebias));
    sum_ = __dadd_rz(sum_, __longlong_as_double(static_cast<long long>(bits)));
  }
  // The warp's sum, returned to every lane.
  __device__ uint64_t OfWarp() const {
    const auto sum =
        static_cast<uint64_t>(__double_as_longlong(sum_) - __double_as_longlong(kZero));
    const auto low = static_cast<uint32_t>(sum);
    // Adds pieces of the words whose sums cannot overflow.
    return (uint64_t{__reduce_add_sync(~0u, static_cast<uint32_t>(sum >> 32))} << 32) +
           (uint64_t{__reduce_add_sync(~0u, low >> 16)} << 16) +
           __reduce_add_sync(~0u, low & 0xffff);
  }

 private:
  static constexpr double kZero = 0x1p12;
  double sum_ = kZero;
};
static_assert(kMaxChunks * 8 < 4096);  // numbers that a thread adds; the exponent stays the same

enum class DrawRule { kNone, kGreedy, kGumbel };

__device__ __forceinline__ uint64_t WideProduct(uint32_t a, uint32_t b) {
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
}

// contract::TokenNoise. INVARIANT: NoiseEqualsTheContract.
__device__ __forceinline__ contract::PhiloxBlock CounterNoise(const RoundKeys& keys,
                                                              const NoiseKey& key,
                                                              uint32_t id_counter) {
  uint32_t c[4] = {id_counter, key.position, key.sample, 0};
  static_assert(contract::kPhiloxRounds % 2 == 0);
#pragma unroll
  for (int pair = 0; pair < contract::kPhiloxRounds / 2; ++pair) {
    const uint4 k = *reinterpret_cast<const uint4*>(&keys.words[4 * pair]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint64_t p0 = WideProduct(0xd2511f53u, c[0]);
      const uint64_t p1 = WideProduct(0xcd9e8d57u, c[2]);
      const uint32_t first = static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ (i == 0 ? k.x : k.z);
      const uint32_t third = static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ (i == 0 ? k.y : k.w);
      c[0] = first;
      c[1] = static_cast<uint32_t>(p1);
      c[2] = third;
      c[3] = static_cast<uint32_t>(p0);
    }
  }
  return {{c[0], c[1], c[2], c[3]}};
}

// A token can reach the value `best` only if its noise is at least best - z, that is, if
// u <= exp(z - best) = w * exp(max - best), where w is its weight against `max`. Returns that last
// factor, enlarged by far more than all rounding errors together.
__device__ __forceinline__ float PruneFactor(float max, float best) {
  const float slack = contract::Fma(fabsf(best), 0x1p-22f, 0x1p-10f);
  return contract::Exp2(
      contract::Mul(contract::Add(contract::Sub(max, best), slack), contract::kLog2E));
}

// Whether a token's value may reach the best one. Compares 1 + u, truncated to 23 fraction bits,
// with 1 + the bound. No rounding can reject a winner. INVARIANT: NoWinnerIsTurnedAway.
__device__ __forceinline__ bool IsCandidate(float weight, uint32_t word, float prune) {
  const float u = contract::FromBits((word >> 9) + 0x3f800000u);
  return !(u > contract::Fma(weight, prune, 1.0f));
}

// A lower bound of the noise: -log(-log(2^-24)) = -2.812. INVARIANT: LeastGumbelIsABound.
inline constexpr float kLeastGumbel = -2.82f;

// A thread's best value so far.
struct BestToken {
  uint64_t key = 0;  // TokenKey of the value
  float logit = 0.0f;

  __device__ void Offer(uint64_t other, float other_logit) {
    if (other <= key) return;
    key = other;
    logit = other_logit;
  }
};

__device__ __forceinline__ void LowerPrune(float max, float best, RangeScratch* scratch) {
  atomicMin(reinterpret_cast<int*>(&scratch->prune),
            static_cast<int>(contract::BitsOf(PruneFactor(max, best))));
}

// Draws among the four tokens of the calling lanes: tries those whose bit is set in `candidates`.
// Then lowers the prune factor, so that fewer tokens of the range are tried from now on. Called
// rarely and out of line, so that it costs the loop no registers.
static __device__ __noinline__ BestToken DrawAmong(float4 z, uint4 words, uint32_t candidates,
                                                   int32_t id, float max, BestToken best,
                                                   RangeScratch* scratch) {
#pragma unroll 1
  for (int j = 0; j < 4; ++j) {
    if ((candidates & 1) != 0) {
      best.Offer(TokenKey(contract::Add(z.x, contract::Gumbel(words.x)), id + j), z.x);
    }
    candidates >>= 1;
    z = {z.y, z.z, z.w, 0.0f};
    words = {words.y, words.z, words.w, 0};
  }
  const uint32_t value = static_cast<uint32_t>(best.key >> 32);
  if (value != __reduce_max_sync(__activemask(), value)) return best;
  if (best.key <= *const_cast<volatile unsigned long long*>(&scratch->best)) return best;
  atomicMax(&scratch->best, static_cast<unsigned long long>(best.key));
  LowerPrune(max, LogitOf(best.key), scratch);
  return best;
}

// Sums the weights of the logits times inverse_temperature against `max`, which is not -inf, and
// draws. kScaled: inverse_temperature is not 1. The result is the warp's and valid in its first
// lane. `loaded`: as in ForEachFour.
template <DrawRule kRule, bool kDistances, bool kScaled, typename Loaded>
__device__ __forceinline__ WarpTotals SumAndDraw(const VocabRange& range, int chunks,
                                                 float inverse_temperature, float max,
                                                 const NoiseKey& noise_key, RangeScratch& scratch,
                                                 Loaded loaded) {
  if constexpr (kRule == DrawRule::kGumbel) {
    if (threadIdx.x % 32 == 0) LowerPrune(max, contract::Add(max, kLeastGumbel), &scratch);
    __syncwarp();
  }
  FractionSum weights;
  FractionSum distances;
  BestToken best;
  const auto visit = [&](int i, Four four, bool) {
    float weight[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (kScaled) four.z[j] = contract::Mul(four.z[j], inverse_temperature);
      const float distance = fmaxf(contract::Sub(four.z[j], max), kLeastDistance);
      weight[j] = WeightAt(distance);
      weights.Add(weight[j]);
      if constexpr (kDistances) distances.Add(contract::Mul(weight[j], fabsf(distance)));
    }
    const int32_t id = range.first + i;
    if constexpr (kRule == DrawRule::kGreedy) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (four.z[j] == max) best.Offer(TokenKey(four.z[j], id + j), four.z[j]);
      }
    }
    if constexpr (kRule == DrawRule::kGumbel) {
      const contract::PhiloxBlock noise =
          CounterNoise(scratch.keys, noise_key, static_cast<uint32_t>(id) / 4);
      const float prune = *const_cast<volatile float*>(&scratch.prune);
      uint32_t candidates = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (IsCandidate(weight[j], noise.words[j], prune)) candidates |= 1u << j;
      }
      if (candidates != 0) {
        best = DrawAmong({four.z[0], four.z[1], four.z[2], four.z[3]},
                         {noise.words[0], noise.words[1], noise.words[2], noise.words[3]},
                         candidates, id, max, best, &scratch);
      }
    }
  };
  ForEachFour(range, chunks, loaded, visit);
  WarpTotals totals{weights.OfWarp(), kDistances ? distances.OfWarp() : 0};
  if constexpr (kRule != DrawRule::kNone) {
    const auto high = static_cast<uint32_t>(best.key >> 32);
    const uint32_t top = __reduce_max_sync(~0u, high);
    const uint32_t low = high == top ? static_cast<uint32_t>(best.key) : 0;
    const uint32_t last = __reduce_max_sync(~0u, low);
    totals.best = uint64_t{top} << 32 | last;
    const int owner = __ffs(static_cast<int>(__ballot_sync(~0u, best.key == totals.best))) - 1;
    totals.best_logit = __shfl_sync(~0u, best.logit, owner);
  }
  return totals;
}

// The totals of a range from those of all warps. Run by one warp; valid in all its lanes.
__device__ __forceinline__ WarpTotals JoinWarps(const WarpTotals (&warps)[kRangeWarps]) {
  WarpTotals all = warps[threadIdx.x % kRangeWarps];
  for (int step = kRangeWarps / 2; step > 0; step /= 2) {
    all.weights += __shfl_xor_sync(~0u, all.weights, step);
    all.distances += __shfl_xor_sync(~0u, all.distances, step);
    const uint64_t best = __shfl_xor_sync(~0u, all.best, step);
    const float logit = __shfl_xor_sync(~0u, all.best_logit, step);
    if (best > all.best) {
      all.best = best;
      all.best_logit = logit;
    }
  }
  return all;
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_LOG_PROBS_VOCAB_RANGE_CUH_
