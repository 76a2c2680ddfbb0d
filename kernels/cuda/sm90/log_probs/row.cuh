// Shared by the kernels of log_probs.h: what follows from a row's parameters, the sums and the draw
// of a range, and how a row's ranges are joined.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LOG_PROBS_ROW_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_LOG_PROBS_ROW_CUH_

#include <cstdint>

#include "kernels/cuda/sm90/log_probs/kernels.h"
#include "kernels/cuda/sm90/log_probs/vocab_range.cuh"
#include "kernels/ops/log_probs.h"

namespace isobit::cuda {

inline constexpr int kRanges = contract::kLeaves;

// What follows from a row's parameters alone.
struct RowPlan {
  float inverse_temperature;
  bool patched;  // some logits are changed individually
  bool top_k;    // whether this filter is on; likewise the next two
  bool top_p;
  bool min_p;
  bool separate;  // logprobs use other logits than the draw
  bool draws;

  __device__ RowPlan(const DeviceLogProbRow& row, int64_t vocab) {
    inverse_temperature = contract::InverseTemperature(row.temperature);
    patched = row.counts.size > 0 || row.biases.size > 0 || row.banned.size > 0;
    const bool warm = row.temperature > 0.0f;
    top_k = warm && row.top_k > 0 && row.top_k < vocab;
    top_p = warm && row.top_p < 1.0f;
    min_p = warm && row.min_p > 0.0f;
    separate = row.raw && (patched || inverse_temperature != 1.0f || Filters());
    draws = row.target < 0;
  }
  __device__ bool Filters() const { return top_k || top_p || min_p; }
};

// Whether the row needs the order of its tokens.
// Targets do not, nor do draws without filters.
__device__ inline bool IsRanked(const RowPlan& plan, const DeviceLogProbRow& row) {
  return plan.Filters() || row.top_logprobs > 0;
}

// This warp's share of a range's sums, if `sums`, and of its draw, if `draws`; see SumAndDraw. Zero
// for a range without tokens (max = -inf).
template <typename Loaded>
__device__ __forceinline__ WarpTotals Summarise(const VocabRange& range, int chunks,
                                                float inverse_temperature, float max,
                                                const DeviceLogProbRow& row, bool sums, bool draws,
                                                RangeScratch& scratch, Loaded loaded) {
  if (max == kMinusInfinity) {
    for (int c = 0; c < chunks; ++c) loaded(range.SlotOf(c));
    return {};
  }
  const NoiseKey noise{row.seed, row.sample, row.position};
  const bool distances = sums && row.want_entropy;
  const auto run = [&]<DrawRule kRule, bool kDistances>() {
    return inverse_temperature == 1.0f
               ? SumAndDraw<kRule, kDistances, false>(range, chunks, 1.0f, max, noise, scratch,
                                                      loaded)
               : SumAndDraw<kRule, kDistances, true>(range, chunks, inverse_temperature, max, noise,
                                                     scratch, loaded);
  };
  if (!draws) {
    return distances ? run.template operator()<DrawRule::kNone, true>()
                     : run.template operator()<DrawRule::kNone, false>();
  }
  if (row.temperature > 0.0f) {
    return distances ? run.template operator()<DrawRule::kGumbel, true>()
                     : run.template operator()<DrawRule::kGumbel, false>();
  }
  return distances ? run.template operator()<DrawRule::kGreedy, true>()
                   : run.template operator()<DrawRule::kGreedy, false>();
}

__device__ inline contract::VocabSum SumOf(float max, const WarpTotals& totals) {
  if (max == kMinusInfinity) return {};
  return contract::RangeSum(max, static_cast<int64_t>(totals.weights),
                            -static_cast<int64_t>(totals.distances));
}

// Combines this lane's value with that of the lane whose number differs in `bit`; left and right
// are as in C4's tree.
__device__ inline contract::VocabSum CombineAcross(const contract::VocabSum& mine, int bit) {
  const contract::VocabSum other{__shfl_xor_sync(~0u, mine.max, bit),
                                 __shfl_xor_sync(~0u, mine.sum, bit),
                                 __shfl_xor_sync(~0u, mine.weighted_distance, bit)};
  return (threadIdx.x & static_cast<unsigned>(bit)) == 0 ? contract::Combine(mine, other)
                                                         : contract::Combine(other, mine);
}

// Writes the outputs of a training row, except what its filters keep. logit: the target's.
__device__ inline void FinishTrainingRow(const TrainingLogProbOutputs& out, int64_t index,
                                         bool finite, float logit, const contract::VocabSum& sum) {
  const float nan = contract::FromBits(0x7fffffffu);
  out.logprobs[index] = finite ? contract::LogProb(contract::Add(logit, 0.0f), sum) : nan;
  if (out.entropies != nullptr) out.entropies[index] = finite ? contract::Entropy(sum) : nan;
  LogProbRow row;
  row.finite = finite ? 1 : 0;
  if (finite) row.sum = {sum.max, sum.sum, sum.weighted_distance};
  out.state[index] = row;
}

// Joins a row's ranges and writes the row's result. Returns the row's VocabSum. Run by one warp;
// lane l has the result of range l % 8 in `mine`. kByRanges: only part of the row's logits is here.
template <bool kByRanges = false>
__device__ __forceinline__ contract::VocabSum FinishRow(const LogProbJob& job, int64_t index,
                                                        const DeviceLogProbRow& row,
                                                        const RowPlan& plan,
                                                        const RangeResult& mine) {
  static_assert(kRanges == 8);
  const int r = static_cast<int>(threadIdx.x % kRanges);
  const bool finite = __any_sync(~0u, mine.unfit) == 0 && __any_sync(~0u, mine.alive) != 0;
  uint64_t best = mine.best;
  for (int bit = 1; bit < kRanges; bit *= 2) {
    const uint64_t other = __shfl_xor_sync(~0u, best, bit);
    best = other > best ? other : best;
  }
  const bool owner = plan.draws ? mine.best == best
                                : row.target >= job.bounds[r] && row.target < job.bounds[r + 1];
  float logit = plan.draws ? mine.best_logit : mine.target_logit;
  const int lane = __ffs(static_cast<int>(__ballot_sync(~0u, owner))) - 1;
  logit = __shfl_sync(~0u, logit, lane);
  const float raw = kByRanges ? __shfl_sync(~0u, mine.raw_logit, lane) : 0.0f;
  const int32_t id = !finite ? 0 : plan.draws ? IdOf(best) : row.target;
  contract::VocabSum sum = CombineAcross(CombineAcross(CombineAcross(mine.sum, 1), 2), 4);
  if (threadIdx.x % 32 != 0) return sum;
  if (job.args.training.state != nullptr) {
    FinishTrainingRow(job.args.training, index, finite, logit, sum);
    return sum;
  }

  DeviceLogProbResult& result = job.args.results[index];
  result.finite = finite ? 1 : 0;
  result.id = id;
  if (job.args.ids != nullptr) job.args.ids[index] = id;
  if (!finite) return sum;
  if (plan.separate) logit = kByRanges ? raw : row.logits[id];
  // A maximum of zero may be +0 or -0. Adding +0 keeps that from changing the result.
  result.logprob = contract::LogProb(contract::Add(logit, 0.0f), sum);
  if (row.want_entropy) result.entropy = contract::Entropy(sum);
  return sum;
}

// The number of chunks of the longest range. Shorter ranges get as many.
__host__ __device__ inline int NumChunks(const LogProbJob& job) {
  return (job.longest + kChunk - 1) / kChunk;
}

// A cursor into a ring of slots: where the next range's chunks begin.
struct RingCursor {
  int32_t slot = 0;
  uint32_t phase = 0;

  __device__ void Advance(int chunks, int slots) {
    slot += chunks;
    if (slot < slots) return;
    slot -= slots;
    phase ^= 1;
  }
};

__device__ inline VocabRange RangeOf(const LogProbJob& job, int range, float* ring,
                                     const RingCursor& cursor) {
  return {.ring = ring,
          .slots = job.slots,
          .first_slot = cursor.slot,
          .first_phase = cursor.phase,
          .size = job.bounds[range + 1] - job.bounds[range],
          .first = job.bounds[range]};
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_LOG_PROBS_ROW_CUH_
