// The kernels of log_probs.h. Plain rows: a block per range, and the last of a row's blocks joins
// them. Ranked rows: a cluster per row, whose blocks first agree on what the filters keep.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/row_order.cuh"
#include "kernels/cuda/device/vocab_range.cuh"
#include "kernels/cuda/log_probs.h"

namespace isobit::cuda {
namespace {

constexpr int kRanges = contract::kLeaves;

// DeviceLogProbs and where the ranges are cut.
struct Job {
  DeviceLogProbs args;
  int32_t bounds[kRanges + 1];
};

// A plain row's place in the workspace.
struct RowRecord {
  RangeResult ranges[kRanges];
  unsigned arrivals;  // of its blocks; zero between launches
};

// What follows from a row's parameters alone.
struct RowPlan {
  float inverse_temperature;
  bool patched;  // some logits are changed one by one
  bool top_k;    // this filter is in force; likewise the next two
  bool top_p;
  bool min_p;
  bool separate;  // logprobs refer to other logits than the draw
  bool draws;

  __device__ RowPlan(const DeviceLogProbRow& row, int64_t vocab) {
    inverse_temperature = contract::InverseTemperature(row.temperature);
    patched = row.counts.size > 0 || row.biases.size > 0 || row.banned.size > 0;
    const bool warm = row.temperature > 0.0f;
    top_k = warm && row.top_k > 0 && row.top_k < vocab;
    top_p = warm && row.top_p < 1.0f;
    min_p = warm && row.min_p > 0.0f;
    separate = row.raw && (patched || inverse_temperature != 1.0f || top_k || top_p || min_p);
    draws = row.target < 0;
  }
};

// Neither a target nor a draw without filters needs the row's order.
__device__ bool IsRanked(const RowPlan& plan, const DeviceLogProbRow& row) {
  return plan.top_k || plan.top_p || plan.min_p || row.top_logprobs > 0;
}

// Copies a row's parameters to shared memory, where all threads read them.
__device__ void ShareRow(const DeviceLogProbRow* from, DeviceLogProbRow* to) {
  static_assert(sizeof(DeviceLogProbRow) % 4 == 0);
  if (threadIdx.x < sizeof(DeviceLogProbRow) / 4) {
    reinterpret_cast<uint32_t*>(to)[threadIdx.x] =
        reinterpret_cast<const uint32_t*>(from)[threadIdx.x];
  }
  __syncthreads();
}

template <DrawRule kRule>
__device__ RangeTotals SumAndDraw(const VocabRange& range, float inverse_temperature, float max,
                                  const DeviceLogProbRow& row, bool distances,
                                  RangeScratch& scratch) {
  const NoiseKey noise{row.seed, row.sample, row.position};
  return distances ? SumAndDraw<kRule, true>(range, inverse_temperature, max, noise, scratch)
                   : SumAndDraw<kRule, false>(range, inverse_temperature, max, noise, scratch);
}

// The part of a range's result that comes of summing: its VocabSum if `sums`, its best token if
// `draws`. Thread 0's.
__device__ void Summarise(const VocabRange& range, float inverse_temperature, float max,
                          const DeviceLogProbRow& row, bool sums, bool draws, RangeScratch& scratch,
                          RangeResult* result) {
  if (max == kMinusInfinity) return;
  RangeTotals totals;
  if (!draws) {
    totals = SumAndDraw<DrawRule::kNone>(range, inverse_temperature, max, row, row.want_entropy,
                                         scratch);
  } else if (row.temperature > 0.0f) {
    totals = SumAndDraw<DrawRule::kGumbel>(range, inverse_temperature, max, row,
                                           sums && row.want_entropy, scratch);
  } else {
    totals = SumAndDraw<DrawRule::kGreedy>(range, inverse_temperature, max, row,
                                           sums && row.want_entropy, scratch);
  }
  if (sums) {
    result->sum = contract::RangeSum(max, static_cast<int64_t>(totals.weights),
                                     -static_cast<int64_t>(totals.distances));
  }
  if (draws && totals.best != 0) {
    result->best = totals.best;
    result->best_logit =
        contract::Mul(range.z[IdOf(totals.best) - range.first], inverse_temperature);
  }
}

// Joins a row's ranges and writes its result. Returns the row's VocabSum. One thread.
__device__ contract::VocabSum FinishRow(const Job& job, int64_t index, const DeviceLogProbRow& row,
                                        const RowPlan& plan, const RangeResult (&ranges)[kRanges]) {
  bool unfit = false;
  bool alive = false;
  contract::VocabSum sums[kRanges];
  uint64_t best = 0;
  float logit = 0.0f;
  for (int r = 0; r < kRanges; ++r) {
    unfit |= ranges[r].unfit;
    alive |= ranges[r].alive;
    sums[r] = ranges[r].sum;
    if (ranges[r].best > best) {
      best = ranges[r].best;
      logit = ranges[r].best_logit;
    }
    if (row.target >= job.bounds[r] && row.target < job.bounds[r + 1]) {
      logit = ranges[r].target_logit;
    }
  }
  DeviceLogProbResult& result = job.args.results[index];
  result.finite = !unfit && alive ? 1 : 0;
  const int32_t id = result.finite == 0 ? 0 : plan.draws ? IdOf(best) : row.target;
  result.id = id;
  if (job.args.ids != nullptr) job.args.ids[index] = id;
  if (result.finite == 0) return {};
  const contract::VocabSum sum = contract::CombineRanges(sums);
  if (plan.separate) logit = row.logits[id];
  // A maximum of zero has either sign; so that this cannot show, the logit has none.
  result.logprob = contract::LogProb(contract::Add(logit, 0.0f), sum);
  if (row.want_entropy) result.entropy = contract::Entropy(sum);
  return sum;
}

__device__ VocabRange RangeOf(const Job& job, int range, float* shared) {
  return {shared, job.bounds[range + 1] - job.bounds[range], job.bounds[range]};
}

// Shared memory is one of the next two, then the range's logits.
struct alignas(16) PlainShared {
  RangeScratch scratch;
  DeviceLogProbRow row;
};
struct alignas(16) RankedShared {
  RangeScratch scratch;
  DeviceLogProbRow row;
  OrderScratch order;
  uint64_t top[kMaxTopLogProbs];
  RangeResult ranges[kRanges];  // block 0's
  contract::VocabSum sum;
};
extern __shared__ __align__(16) std::byte shared_memory[];

__global__ void __launch_bounds__(kRangeThreads, 2) PlainRows(const __grid_constant__ Job job) {
  auto& shared = *reinterpret_cast<PlainShared*>(shared_memory);
  RangeScratch& scratch = shared.scratch;
  DeviceLogProbRow& row = shared.row;
  ReleaseSuccessor();
  WaitForPredecessor();
  const int64_t index = blockIdx.x / kRanges;
  const int r = static_cast<int>(blockIdx.x % kRanges);
  ShareRow(&job.args.rows[index], &row);
  const RowPlan plan(row, job.args.vocab);
  if (row.logits == nullptr || IsRanked(plan, row)) return;

  const VocabRange range =
      RangeOf(job, r, reinterpret_cast<float*>(shared_memory + sizeof(PlainShared)));
  StartLoading(range, row.logits, scratch);
  const RangeMax raw = AwaitRaw(range, scratch);
  RangeResult result;
  if (plan.separate) Summarise(range, 1.0f, raw.max, row, true, false, scratch, &result);
  float inverse = plan.inverse_temperature;
  RangeMax processed{contract::Mul(raw.max, inverse), false};
  processed.unfit = range.size > 0 && !(processed.max < -kMinusInfinity);
  if (plan.patched) {
    processed = Process(range, row, job.args, inverse, scratch);
    inverse = 1.0f;
  }
  if (plan.draws || !plan.separate) {
    Summarise(range, inverse, processed.max, row, !plan.separate, plan.draws, scratch, &result);
  }
  if (threadIdx.x != 0) return;
  result.unfit = raw.unfit || processed.unfit;
  result.alive = processed.max > kMinusInfinity;
  if (range.Holds(row.target)) {
    result.target_logit = contract::Mul(range.z[row.target - range.first], inverse);
  }
  RowRecord& record = reinterpret_cast<RowRecord*>(job.args.workspace)[index];
  record.ranges[r] = result;
  __threadfence();
  if (atomicInc(&record.arrivals, kRanges - 1) != kRanges - 1) return;
  __threadfence();
  FinishRow(job, index, row, plan, record.ranges);
}

// ---- Ranked rows

// A maximum and a flag as one word.
__device__ uint64_t Pack(const RangeMax& max) {
  return uint64_t{AscendingBits(max.max)} << 1 | (max.unfit ? 1 : 0);
}

// The same of the whole row.
__device__ RangeMax OfRow(RowCluster& cluster, const RangeMax& mine, OrderScratch& order) {
  cluster.Exchange(Pack(mine), order);
  RangeMax all{kMinusInfinity, false};
  for (int r = 0; r < kRanges; ++r) {
    const uint64_t word = order.inbox[r];
    all.max = fmaxf(all.max, FromAscendingBits(static_cast<uint32_t>(word >> 1)));
    all.unfit |= (word & 1) != 0;
  }
  cluster.Sync();
  return all;
}

// Filters out, in place, every token for which `kept(z, id)` is false.
template <typename Kept>
__device__ void Keep(const VocabRange& range, Kept kept) {
  for (int i = static_cast<int>(threadIdx.x); i < range.size; i += kRangeThreads) {
    if (!kept(range.z[i], range.first + i)) range.z[i] = kMinusInfinity;
  }
  __syncthreads();
}

__device__ void KeepPrefix(const VocabRange& range, uint64_t last) {
  if (last == 0) return;
  Keep(range, [&](float z, int32_t id) { return TokenKey(z, id) >= last; });
}

__device__ float MaxOf(const VocabRange& range, RangeScratch& scratch) {
  float max = kMinusInfinity;
  for (int i = static_cast<int>(threadIdx.x); i < range.size; i += kRangeThreads) {
    max = fmaxf(max, range.z[i]);
  }
  return BlockMax(max, scratch);
}

// C8's filters, in their order, on a row of processed logits with the maximum row_max.
__device__ void Filter(RowCluster& cluster, const VocabRange& range, const DeviceLogProbRow& row,
                       const RowPlan& plan, float row_max, OrderScratch& order,
                       RangeScratch& scratch) {
  if (plan.top_k) {
    KeepPrefix(range, LastOfPrefix<false>(cluster, range, row_max, row.top_k, 0.0f, order));
  }
  if (plan.top_p) {
    KeepPrefix(range, LastOfPrefix<true>(cluster, range, row_max, 0, row.top_p, order));
  }
  if (plan.min_p) {
    // What comes before the first token that fails, which need not be where a monotone function
    // would fail: so the largest failing logit is looked for, not a threshold.
    float cut = kMinusInfinity;
    for (int i = static_cast<int>(threadIdx.x); i < range.size; i += kRangeThreads) {
      const float z = range.z[i];
      if (!contract::PassesMinP(z, row_max, row.min_p)) cut = fmaxf(cut, z);
    }
    cut = OfRow(cluster, {BlockMax(cut, scratch), false}, order).max;
    Keep(range, [&](float z, int32_t) { return z > cut; });
  }
}

// The keys of the row's first `count` tokens, in order, in `top` of every block. Returns their
// number, which is less if fewer are not filtered out.
__device__ int RankTop(RowCluster& cluster, const VocabRange& range, float row_max, int32_t count,
                       OrderScratch& order, uint64_t* top) {
  const uint64_t last = LastOfPrefix<false>(cluster, range, row_max, count, 0.0f, order);
  const int size = Gather(
      cluster, range,
      [&](float z, int32_t id) { return z > kMinusInfinity && TokenKey(z, id) >= last; }, order);
  for (int i = static_cast<int>(threadIdx.x); i < size; i += kRangeThreads) {
    const uint64_t key = order.gathered[i];
    int rank = 0;
    for (int j = 0; j < size; ++j) rank += order.gathered[j] > key ? 1 : 0;
    top[rank] = key;
  }
  __syncthreads();
  return size;
}

__global__ void __launch_bounds__(kRangeThreads, 2) RankedRows(const __grid_constant__ Job job) {
  auto& shared = *reinterpret_cast<RankedShared*>(shared_memory);
  RangeScratch& scratch = shared.scratch;
  OrderScratch& order = shared.order;
  DeviceLogProbRow& row = shared.row;
  ReleaseSuccessor();
  WaitForPredecessor();
  const int64_t index = blockIdx.x / kRanges;
  ShareRow(&job.args.rows[index], &row);
  const RowPlan plan(row, job.args.vocab);
  if (row.logits == nullptr || !IsRanked(plan, row)) return;

  RowCluster cluster;
  const int r = cluster.rank();
  const VocabRange range =
      RangeOf(job, r, reinterpret_cast<float*>(shared_memory + sizeof(RankedShared)));
  StartLoading(range, row.logits, scratch);
  cluster.Sync();  // every block runs: its shared memory can be reached
  const RangeMax raw = AwaitRaw(range, scratch);
  RangeResult result;
  int num_top = 0;
  if (plan.separate) {
    Summarise(range, 1.0f, raw.max, row, true, false, scratch, &result);
    if (row.top_logprobs > 0) {
      const float row_max = OfRow(cluster, raw, order).max;
      num_top = RankTop(cluster, range, row_max, row.top_logprobs, order, shared.top);
    }
  }
  RangeMax processed = Process(range, row, job.args, plan.inverse_temperature, scratch);
  processed.unfit |= raw.unfit;
  const RangeMax all = OfRow(cluster, processed, order);
  const bool finite = !all.unfit && all.max > kMinusInfinity;
  if (finite && (plan.draws || !plan.separate)) {
    Filter(cluster, range, row, plan, all.max, order, scratch);
    Summarise(range, 1.0f, MaxOf(range, scratch), row, !plan.separate, plan.draws, scratch,
              &result);
    if (!plan.separate && row.top_logprobs > 0) {
      num_top = RankTop(cluster, range, all.max, row.top_logprobs, order, shared.top);
    }
  }
  if (threadIdx.x == 0) {
    result.unfit = processed.unfit;
    result.alive = processed.max > kMinusInfinity;
    if (range.Holds(row.target)) result.target_logit = range.z[row.target - range.first];
    *cluster.Of(0, &shared.ranges[r]) = result;
  }
  cluster.Sync();
  if (r != 0) return;
  if (threadIdx.x == 0) shared.sum = FinishRow(job, index, row, plan, shared.ranges);
  __syncthreads();
  if (!finite) return;
  TokenLogProb* top = job.args.top + index * job.args.top_stride;
  for (int i = static_cast<int>(threadIdx.x); i < row.top_logprobs; i += kRangeThreads) {
    top[i] = {-1, kMinusInfinity};
    if (i >= num_top) continue;
    const uint64_t key = shared.top[i];
    top[i] = {IdOf(key), contract::LogProb(LogitOf(key), shared.sum)};
  }
}

}  // namespace

size_t LogProbWorkspaceBytes(int64_t num_rows) {
  return static_cast<size_t>(num_rows) * sizeof(RowRecord);
}

absl::Status LaunchLogProbs(const DeviceLogProbs& args, const Stream& stream) {
  if (args.vocab > kMaxDeviceVocab) {
    return absl::InvalidArgumentError(absl::StrCat("a vocabulary of ", args.vocab,
                                                   " tokens; at most ", kMaxDeviceVocab,
                                                   " are supported on a GPU"));
  }
  const contract::LeafPlan plan = contract::PlanColumns(args.vocab);
  Job job{.args = args, .bounds = {}};
  int64_t longest = 0;
  for (size_t l = 0; l <= kRanges; ++l) {
    job.bounds[l] = static_cast<int32_t>(plan.bounds[l]);
    if (l > 0) longest = std::max(longest, plan.bounds[l] - plan.bounds[l - 1]);
  }
  Grid grid;
  grid.blocks = dim3(static_cast<unsigned>(args.num_rows * kRanges));
  grid.threads = dim3(kRangeThreads);
  const size_t logit_bytes = static_cast<size_t>(longest) * sizeof(float);
  grid.shared_bytes = sizeof(PlainShared) + logit_bytes;
  if (const absl::Status status = Launch(PlainRows, grid, stream, job);
      !status.ok() || !args.ranked_rows) {
    return status;
  }
  grid.cluster = kRanges;
  grid.shared_bytes = sizeof(RankedShared) + logit_bytes;
  return Launch(RankedRows, grid, stream, job);
}

}  // namespace isobit::cuda
