// Rows with filters or top lists: one cluster per row, one range per block. Filters mostly keep few
// tokens. Then block 0 gathers them and processes them as the contract says. Otherwise the blocks
// find together where the kept prefix ends, and each processes its range.
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/sm90/log_probs/kernels.h"
#include "kernels/cuda/sm90/log_probs/row.cuh"
#include "kernels/cuda/sm90/log_probs/row_order.cuh"
#include "kernels/cuda/sm90/log_probs/short_prefix.cuh"
#include "kernels/ops/log_probs.h"

namespace isobit::cuda {
namespace {

// Shared memory in front of the logits.
struct alignas(16) Shared {
  RangeScratch scratch;
  uint64_t full;  // barrier: the logits have arrived
  DeviceLogProbRow row;
  OrderScratch order;
  uint64_t top[kMaxTopLogProbs];
  RangeResult ranges[kRanges];  // used in block 0 only
  contract::VocabSum sum;
  WarpTotals totals[kRangeWarps];
  uint64_t last_kept;  // see LastKept; used in block 0 only
};
extern __shared__ __align__(16) std::byte shared_memory[];

// A maximum and a flag as one word.
__device__ uint64_t Pack(const RangeMax& max) {
  return uint64_t{AscendingBits(max.max)} << 1 | (max.unfit ? 1 : 0);
}

// The maximum of the whole row; `own` stays this thread's.
__device__ RangeMax OfRow(RowCluster& cluster, const RangeMax& mine, OrderScratch& order) {
  const uint64_t* words = cluster.Exchange(Pack(mine), order);
  RangeMax all{kMinusInfinity, false, mine.own};
  for (int r = 0; r < kRanges; ++r) {
    all.max = fmaxf(all.max, FromAscendingBits(static_cast<uint32_t>(words[r] >> 1)));
    all.unfit |= (words[r] & 1) != 0;
  }
  return all;
}

// Filters out, in place, every token for which `kept(z, id)` is false.
template <typename Kept>
__device__ void Keep(const VocabRange& range, Kept kept) {
  ForEachFour(range, [&](int i, Four four) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (!kept(four.z[j], range.first + i + j)) four.z[j] = kMinusInfinity;
    }
    StoreFour(range, i, four);
  });
  SyncRange();
}

__device__ void KeepPrefix(const VocabRange& range, uint64_t last) {
  if (last == 0) return;
  Keep(range, [&](float z, int32_t id) { return TokenKey(z, id) >= last; });
}

__device__ RangeMax MaxOf(const VocabRange& range, uint64_t seed, RangeScratch& scratch) {
  float max = kMinusInfinity;
  ForEachFour(range, [&](int, const Four& four) {
#pragma unroll
    for (int j = 0; j < 4; ++j) max = fmaxf(max, four.z[j]);
  });
  return BlockMax({max, false}, seed, scratch);
}

// Applies C8's filters, in their order, to a row of processed logits with the maximum row_max.
__device__ __noinline__ void Filter(RowCluster& cluster, const VocabRange& range,
                                    const DeviceLogProbRow& row, const RowPlan& plan, float row_max,
                                    OrderScratch& order, RangeScratch& scratch) {
  if (plan.min_p) {
    // Keeps what comes before the first token that fails. The test may not be monotone because of
    // rounding, so this finds the largest logit that fails instead of computing a threshold.
    float cut = kMinusInfinity;
    ForEachFour(range, [&](int, const Four& four) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (!contract::PassesMinP(four.z[j], row_max, row.min_p)) cut = fmaxf(cut, four.z[j]);
      }
    });
    cut = OfRow(cluster, BlockMax({cut, false}, row.seed, scratch), order).max;
    Keep(range, [&](float z, int32_t) { return z > cut; });
  }
  if (plan.top_k) {
    KeepPrefix(range, LastOfPrefix<false>(cluster, range, row_max, row.top_k, 0.0f, order));
  }
  if (plan.top_p) {
    KeepPrefix(range, LastOfPrefix<true>(cluster, range, row_max, 0, row.top_p, order));
  }
}

// The key of the last token in the row's order that the filters have kept; 0: they kept all.
__device__ __noinline__ uint64_t LastKept(RowCluster& cluster, const VocabRange& range,
                                          OrderScratch& order) {
  uint64_t least = ~uint64_t{0};
  uint64_t filtered = 0;
  ForEachFour(range, [&](int i, const Four& four) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (i + j >= range.size) continue;
      const uint64_t key = TokenKey(four.z[j], range.first + i + j);
      if (four.z[j] == kMinusInfinity) filtered = 1;
      if (four.z[j] > kMinusInfinity && key < least) least = key;
    }
  });
  filtered = LargestOfRow(cluster, filtered, order);
  least = ~LargestOfRow(cluster, ~least, order);
  return filtered != 0 ? least : 0;
}

// Writes the keys of the row's first `count` tokens, in order, to `top` of every block. Returns
// their number, which is less than `count` if the filters keep fewer. `max`: the row's maximum, and
// the thread's own.
__device__ __noinline__ int RankTop(RowCluster& cluster, const VocabRange& range,
                                    const RangeMax& max, int32_t count, OrderScratch& order,
                                    uint64_t* top) {
  const float threshold = ThresholdOfCount(cluster, max.own, max.max, count, order);
  int size = Gather(
      cluster, range, [&](float z, int32_t) { return z >= threshold && z > kMinusInfinity; },
      order);
  if (size > kMaxTopLogProbs) {
    const uint64_t last = LastOfPrefix<false>(cluster, range, max.max, count, 0.0f, order);
    size = Gather(
        cluster, range, [&](float z, int32_t id) { return TokenKey(z, id) >= last; }, order);
  }
  SortGathered(size, order);
  size = min(size, count);
  for (int i = static_cast<int>(threadIdx.x); i < size; i += kRangeThreads) {
    top[i] = order.gathered[i];
  }
  SyncRange();
  return size;
}

// Gathers all tokens that the row's filters can keep; if there are others beside top_p, all that
// those keep. With top_p alone, *mass becomes the mass of the row. Returns the number of tokens; if
// it is more than kMaxTopLogProbs, nothing is gathered.
__device__ __noinline__ int GatherCandidates(RowCluster& cluster, const VocabRange& range,
                                             const DeviceLogProbRow& row, const RowPlan& plan,
                                             const RangeMax& max, OrderScratch& order,
                                             uint64_t* mass) {
  float threshold = kMinusInfinity;
  if (plan.top_k) {
    threshold = ThresholdOfCount(cluster, max.own, max.max, row.top_k, order);
  } else if (plan.top_p && !plan.min_p) {
    // A prefix that is long enough for most nuclei and short enough to be gathered.
    threshold = ThresholdOfCount(cluster, max.own, max.max, kMaxTopLogProbs / 2, order);
    *mass = NarrowToNucleus(cluster, range, max.max, row.top_p, order, &threshold);
  }
  if (plan.min_p) threshold = fmaxf(threshold, ThresholdOfMinP(max.max, row.min_p));
  if (threshold == kMinusInfinity) {
    cluster.Sync();
    return kMaxTopLogProbs + 1;
  }
  return Gather(
      cluster, range, [&](float z, int32_t) { return z >= threshold && z > kMinusInfinity; },
      order);
}

// How many of the first `size` sorted keys the filters keep. `mass`: of the row, if top_p is the
// only filter.
__device__ int KeptOf(int size, const DeviceLogProbRow& row, const RowPlan& plan, float row_max,
                      uint64_t mass, OrderScratch& order) {
  int kept = size;
  if (plan.min_p) {
    if (threadIdx.x == 0) order.bin = static_cast<uint32_t>(kept);
    SyncRange();
    for (int i = static_cast<int>(threadIdx.x); i < kept; i += kRangeThreads) {
      if (!contract::PassesMinP(LogitOf(order.gathered[i]), row_max, row.min_p)) {
        atomicMin(&order.bin, static_cast<uint32_t>(i));
      }
    }
    SyncRange();
    kept = static_cast<int>(order.bin);
  }
  if (plan.top_k) kept = min(kept, row.top_k);
  if (plan.top_p) {
    uint64_t* weights = order.list;
    for (int i = static_cast<int>(threadIdx.x); i < kept; i += kRangeThreads) {
      weights[i] = MassOf<true>(LogitOf(order.gathered[i]), row_max);
    }
    SyncRange();
    if (threadIdx.x < 32) {
      const int lane = static_cast<int>(threadIdx.x);
      const int each = (kept + 31) / 32;
      const int end = min(kept, (lane + 1) * each);
      uint64_t mine = 0;
      for (int i = lane * each; i < end; ++i) mine += weights[i];
      uint64_t sum = mine;
      for (int step = 1; step < 32; step *= 2) {
        const uint64_t other = __shfl_up_sync(~0u, sum, static_cast<unsigned>(step));
        if (lane >= step) sum += other;
      }
      const uint64_t all = __shfl_sync(~0u, sum, 31);
      const uint64_t total = plan.top_k || plan.min_p ? all : mass;
      const auto need =
          static_cast<uint64_t>(contract::NucleusBound(static_cast<int64_t>(total), row.top_p));
      if (lane == 0) order.bin = static_cast<uint32_t>(kept);
      __syncwarp();
      uint64_t before = sum - mine;
      for (int i = lane * each; i < end; ++i) {
        if (before < need && before + weights[i] >= need) order.bin = static_cast<uint32_t>(i + 1);
        before += weights[i];
      }
    }
    SyncRange();
    kept = static_cast<int>(order.bin);
  }
  return kept;
}

// The sums of range `r` over the first `kept` sorted keys, by one warp.
__device__ contract::VocabSum SumOfKept(const LogProbJob& job, int r, int kept, bool distances,
                                        const OrderScratch& order) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const auto holds = [&](uint64_t key) {
    return IdOf(key) >= job.bounds[r] && IdOf(key) < job.bounds[r + 1];
  };
  unsigned first = ~0u;  // its logit is the maximum
  for (int i = lane; i < kept && first == ~0u; i += 32) {
    if (holds(order.gathered[i])) first = static_cast<unsigned>(i);
  }
  first = __reduce_min_sync(~0u, first);
  if (first == ~0u) return {};
  const float max = LogitOf(order.gathered[first]);
  int64_t weights = 0;
  int64_t weighted_distances = 0;
  for (int i = lane; i < kept; i += 32) {
    const uint64_t key = order.gathered[i];
    if (!holds(key)) continue;
    weights += contract::TokenWeight(LogitOf(key), max);
    if (distances) weighted_distances += contract::TokenWeightedDistance(LogitOf(key), max);
  }
  for (int step = 16; step > 0; step /= 2) {
    weights += __shfl_xor_sync(~0u, weights, step);
    weighted_distances += __shfl_xor_sync(~0u, weighted_distances, step);
  }
  return contract::RangeSum(max, weights, weighted_distances);
}

// Completes shared.ranges, shared.top and shared.last_kept from the row's gathered candidates. Run
// by one block. Returns the length of the top list.
__device__ __noinline__ int GoThroughCandidates(const LogProbJob& job, const RowPlan& plan,
                                                int size, float row_max, uint64_t mass,
                                                Shared& shared) {
  const DeviceLogProbRow& row = shared.row;
  OrderScratch& order = shared.order;
  SortGathered(size, order);
  const int kept = KeptOf(size, row, plan, row_max, mass, order);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < kRanges) {
    RangeResult& range = shared.ranges[warp];
    contract::VocabSum sum;
    if (!plan.separate) sum = SumOfKept(job, warp, kept, row.want_entropy, order);
    if (threadIdx.x % 32 == 0) {
      if (!plan.separate) range.sum = sum;
      range.target_logit = kMinusInfinity;
      range.best = 0;
    }
  }
  if (threadIdx.x == 0) {
    shared.scratch.best = 0;
    shared.last_kept = kept < job.args.vocab ? order.gathered[kept - 1] : 0;
  }
  SyncRange();
  uint64_t best = 0;
  float best_logit = 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < kept; i += kRangeThreads) {
    const int32_t id = IdOf(order.gathered[i]);
    const float z = LogitOf(order.gathered[i]);
    if (id == row.target) {
      for (int r = 0; r < kRanges; ++r) shared.ranges[r].target_logit = z;
    }
    if (!plan.draws) continue;
    const float noise =
        contract::TokenGumbel(row.seed, row.sample, row.position, static_cast<uint32_t>(id));
    const uint64_t key = TokenKey(contract::Add(z, noise), id);
    if (key > best) {
      best = key;
      best_logit = z;
    }
  }
  if (best != 0) atomicMax(&shared.scratch.best, static_cast<unsigned long long>(best));
  SyncRange();
  if (best != 0 && best == shared.scratch.best) {
    shared.ranges[0].best = best;
    shared.ranges[0].best_logit = best_logit;
  }
  const int listed = plan.separate ? 0 : min(kept, row.top_logprobs);
  for (int i = static_cast<int>(threadIdx.x); i < listed; i += kRangeThreads) {
    shared.top[i] = order.gathered[i];
  }
  SyncRange();
  return listed;
}

// The block's totals from those of its warps, for every thread.
__device__ WarpTotals JoinBlock(const WarpTotals& mine, Shared& shared) {
  SyncRange();
  if (threadIdx.x % 32 == 0) shared.totals[threadIdx.x / 32] = mine;
  SyncRange();
  return JoinWarps(shared.totals);
}

__global__ void __launch_bounds__(kRangeThreads, 2)
    RankedLogProbs(const __grid_constant__ LogProbJob job) {
  auto& shared = *reinterpret_cast<Shared*>(shared_memory);
  RangeScratch& scratch = shared.scratch;
  OrderScratch& order = shared.order;
  DeviceLogProbRow& row = shared.row;
  ReleaseSuccessor();
  WaitForPredecessor();
  const int64_t index = blockIdx.x / kRanges;
  static_assert(sizeof(DeviceLogProbRow) % 4 == 0);
  if (threadIdx.x < sizeof(DeviceLogProbRow) / 4) {
    reinterpret_cast<uint32_t*>(&row)[threadIdx.x] =
        reinterpret_cast<const uint32_t*>(&job.args.rows[index])[threadIdx.x];
  }
  const int chunks = NumChunks(job);
  const uint32_t full = SharedAddress(&shared.full);
  if (threadIdx.x == 0) {
    InitBarrier(full, static_cast<uint32_t>(chunks) * kRangeThreads);
    FenceBarrierInit();
  }
  SyncRange();
  const RowPlan plan(row, job.args.vocab);
  if (row.logits == nullptr || !IsRanked(plan, row)) return;

  RowCluster cluster;
  const int r = cluster.rank();
  const VocabRange range =
      RangeOf(job, r, reinterpret_cast<float*>(shared_memory + sizeof(Shared)), {});
  const auto keep = [](int) {};
  for (int c = 0; c < chunks; ++c) {
    StartChunk<kRangeThreads>(range, row.logits, c, static_cast<int>(threadIdx.x), full);
  }
  cluster.Arrive();
  WaitBarrier(full, 0);
  const RangeMax raw = MaxOfLogits(range, row.seed, scratch);
  cluster.AwaitAll();
  RangeResult result;
  int num_top = 0;
  if (plan.separate) {
    const WarpTotals totals =
        JoinBlock(Summarise(range, chunks, 1.0f, raw.max, row, true, false, scratch, keep), shared);
    result.sum = SumOf(raw.max, totals);
    if (row.top_logprobs > 0) {
      num_top =
          RankTop(cluster, range, OfRow(cluster, raw, order), row.top_logprobs, order, shared.top);
    }
  }
  RangeMax processed = raw;
  if (plan.patched || plan.inverse_temperature != 1.0f) {
    processed = Process(range, row, job.args, plan.inverse_temperature, scratch);
    processed.unfit |= raw.unfit;
  }
  const RangeMax all = OfRow(cluster, processed, order);
  const bool finite = !all.unfit && all.max > kMinusInfinity;
  uint64_t mass = 0;
  int candidates = 0;  // gathered tokens; 0: the result is computed from the ranges
  if (finite && (plan.draws || !plan.separate)) {
    if (plan.Filters()) {
      candidates = GatherCandidates(cluster, range, row, plan, all, order, &mass);
      if (candidates > kMaxTopLogProbs) {
        candidates = 0;
        Filter(cluster, range, row, plan, all.max, order, scratch);
        if (job.args.training.state != nullptr) {
          const uint64_t last = LastKept(cluster, range, order);
          if (threadIdx.x == 0) shared.last_kept = last;
        }
      }
    }
    if (candidates == 0) {
      const RangeMax kept = MaxOf(range, row.seed, scratch);
      const WarpTotals totals = JoinBlock(
          Summarise(range, chunks, 1.0f, kept.max, row, !plan.separate, plan.draws, scratch, keep),
          shared);
      if (!plan.separate) result.sum = SumOf(kept.max, totals);
      result.best = totals.best;
      result.best_logit = totals.best_logit;
      if (!plan.separate && row.top_logprobs > 0) {
        num_top = RankTop(cluster, range, {all.max, false, kept.own}, row.top_logprobs, order,
                          shared.top);
      }
    }
  }
  if (threadIdx.x == 0) {
    result.unfit = processed.unfit;
    result.alive = processed.max > kMinusInfinity;
    if (range.Holds(row.target)) result.target_logit = range.At(row.target - range.first);
    *cluster.Of(0, &shared.ranges[r]) = result;
  }
  cluster.Sync();
  if (r != 0) return;
  if (candidates > 0) {
    const int listed = GoThroughCandidates(job, plan, candidates, all.max, mass, shared);
    if (!plan.separate) num_top = listed;
  }
  if (threadIdx.x < 32) {
    shared.sum = FinishRow(job, index, row, plan, shared.ranges[threadIdx.x % kRanges]);
  }
  SyncRange();
  if (!finite) return;
  if (job.args.training.state != nullptr) {
    if (threadIdx.x == 0 && shared.last_kept != 0) {
      LogProbRow& state = job.args.training.state[index];
      state.last_z = LogitOf(shared.last_kept);
      state.last_id = IdOf(shared.last_kept);
    }
    return;
  }
  TokenLogProb* top = job.args.top + index * job.args.top_stride;
  for (int i = static_cast<int>(threadIdx.x); i < row.top_logprobs; i += kRangeThreads) {
    top[i] = {-1, kMinusInfinity};
    if (i >= num_top) continue;
    const uint64_t key = shared.top[i];
    top[i] = {IdOf(key), contract::LogProb(LogitOf(key), shared.sum)};
  }
}

}  // namespace

absl::Status LaunchRankedLogProbs(const LogProbJob& job, const Stream& stream) {
  Grid grid;
  grid.blocks = dim3(static_cast<unsigned>(job.args.num_rows * kRanges));
  grid.threads = dim3(kRangeThreads);
  // LoadFour reads four logits at a time.
  grid.shared_bytes = sizeof(Shared) + static_cast<size_t>(job.longest + 3) / 4 * sizeof(float4);
  grid.cluster = kRanges;
  LogProbJob sized = job;
  sized.slots = NumChunks(job);
  return Launch(RankedLogProbs, grid, stream, sized);
}

}  // namespace isobit::cuda
