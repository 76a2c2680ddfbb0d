// Rows without filters and top lists, whose tokens need no order. Each range is one task, and the
// block that finishes a row's last task joins its ranges. Blocks are persistent and their warps are
// specialised. A task passes through four roles: one warp fetches its logits, chunk by chunk, as
// the workers finish those of the task before; two warps survey them for their maximum as they
// arrive; eight warps, the workers, sum weights and draw; one warp writes the result. So memory
// never waits for arithmetic, and the workers never wait for each other, unless single logits have
// to be changed.
//
// If the row's logits lie on several GPUs, the tasks are the ranges of this GPU, and another kernel
// joins their results with those of the other GPUs.
#include <algorithm>

#include "common/base/round_up.h"
#include "common/base/status_macros.h"
#include "kernels/cuda/common/device/card.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/sm90/device/shared_memory.h"
#include "kernels/cuda/sm90/log_probs/kernels.h"
#include "kernels/cuda/sm90/log_probs/row.cuh"

namespace isobit::cuda {
namespace {

constexpr int kBlocksPerSm = 2;
// Shared memory of each of them.
constexpr size_t kBlockBytes = kMultiprocessorSharedBytes / kBlocksPerSm - kReservedSharedBytes;
constexpr int kCopyAlignment = 128;  // bytes
constexpr int kSlot = kChunk + kCopyAlignment / static_cast<int>(sizeof(float));
constexpr size_t kSlotBytes = kSlot * sizeof(float);
constexpr int kFetchThreads = 32;
constexpr int kSurveyWarps = 2;
constexpr int kSurveyThreads = 32 * kSurveyWarps;
constexpr int kThreads = kRangeThreads + kFetchThreads + kSurveyThreads + 32;

// A row's record in the workspace.
struct RowRecord {
  RangeResult ranges[kRanges];
  unsigned arrivals;  // of finished ranges; zero between launches
};

// A task: one range of one row. Its parameters and its results so far.
struct Task {
  DeviceLogProbRow row;
  RowPlan plan;
  int64_t index;  // of the row
  int32_t range;  // -1: there are no more
  RangeMax surveyed[kSurveyWarps];
  RangeScratch scratch;
  RangeMax processed;
  float target_logit;
  WarpTotals sums[kRangeWarps];
  WarpTotals draw[kRangeWarps];  // the sums as well, unless RowPlan::separate

  // The maximum of the unprocessed logits.
  __device__ RangeMax Raw() const {
    RangeMax raw = surveyed[0];
    for (int w = 1; w < kSurveyWarps; ++w) {
      raw.max = fmaxf(raw.max, surveyed[w].max);
      raw.unfit |= surveyed[w].unfit;
    }
    return raw;
  }
};

// Tasks in flight in a block: one is fetched and one computed while the results of others are
// written.
constexpr int kTaskSlots = 4;

// Shared memory in front of the ring of chunks. The n-th task of a block lies in slot
// n % kTaskSlots; its chunks follow those of the task before.
struct alignas(kCopyAlignment) Shared {
  uint64_t full[kMaxChunks];    // barriers, one a slot: its chunk has arrived
  uint64_t empty[kMaxChunks];   // it may be overwritten
  uint64_t posted[kTaskSlots];  // the task's parameters are there
  uint64_t ready[kTaskSlots];   // its logits have arrived and are surveyed
  uint64_t done[kTaskSlots];    // the workers are done with it
  uint64_t free[kTaskSlots];    // its place may be overwritten
  Task tasks[kTaskSlots];
};
extern __shared__ __align__(128) std::byte shared_memory[];

// A task's range. Its logits have the same offset from a multiple of kCopyAlignment in shared
// memory as in GPU memory: bulk copies between different offsets are slow.
__device__ VocabRange RangeOfTask(const LogProbJob& job, int range, const float* logits,
                                  const RingCursor& cursor) {
  VocabRange result =
      RangeOf(job, range, reinterpret_cast<float*>(shared_memory + sizeof(Shared)), cursor);
  result.stride = kSlot;
  result.ring += reinterpret_cast<uintptr_t>(logits + result.first) % kCopyAlignment / 16 * 4;
  return result;
}

// Waits for task n's phase of `barriers`.
__device__ void Await(const uint64_t (&barriers)[kTaskSlots], int n) {
  WaitBarrier(SharedAddress(&barriers[n % kTaskSlots]), static_cast<uint32_t>(n / kTaskSlots) % 2);
}
// One arrival at task n's barrier by every calling thread.
__device__ void Tell(const uint64_t (&barriers)[kTaskSlots], int n) {
  Arrive(SharedAddress(&barriers[n % kTaskSlots]));
}
// One arrival for the whole warp, once all its lanes have come here.
__device__ void TellByOne(const uint64_t (&barriers)[kTaskSlots], int n) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) Tell(barriers, n);
}

// The fetching warp: copies logits into the ring.
__device__ void Fetch(const LogProbJob& job, Shared& shared) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int chunks = NumChunks(job);
  const int64_t num_tasks = job.args.num_rows * job.ranges.count;
  RingCursor cursor;
  int n = 0;
  for (int64_t t = blockIdx.x;; t += gridDim.x) {
    const bool end = t >= num_tasks;
    const int64_t index = end ? 0 : t / job.ranges.count;
    const int range_id = job.ranges.first + static_cast<int>(t - index * job.ranges.count);
    const DeviceLogProbRow* row = &job.args.rows[index];
    const RowPlan plan(*row, job.args.vocab);
    if (!end && (row->logits == nullptr || IsRanked(plan, *row))) continue;
    const float* const logits = row->logits - job.bounds[job.ranges.first];  // of id 0
    if (n >= kTaskSlots) Await(shared.free, n - kTaskSlots);
    Task& task = shared.tasks[n % kTaskSlots];
    static_assert(sizeof(DeviceLogProbRow) % 4 == 0 && sizeof(DeviceLogProbRow) <= 4 * 32);
    if (lane < static_cast<int>(sizeof(DeviceLogProbRow) / 4)) {
      reinterpret_cast<uint32_t*>(&task.row)[lane] = reinterpret_cast<const uint32_t*>(row)[lane];
    }
    __syncwarp();
    if (lane == 0) {
      task.row.logits = logits;
      task.plan = plan;
      task.index = index;
      task.range = end ? -1 : range_id;
    }
    Tell(shared.posted, n);
    if (end) return;
    const VocabRange range = RangeOfTask(job, range_id, logits, cursor);
    for (int c = 0; c < chunks; ++c) {
      const int slot = range.SlotOf(c);
      WaitBarrier(SharedAddress(&shared.empty[slot]), range.PhaseOf(c) ^ 1);
      __syncwarp();
      StartChunk<kFetchThreads>(range, logits, c, lane, SharedAddress(&shared.full[slot]));
    }
    cursor.Advance(chunks, job.slots);
    ++n;
  }
}

// The surveying warps find the maximum of the raw logits. This is thread number `thread` of them.
__device__ void Survey(const LogProbJob& job, Shared& shared, int thread) {
  constexpr int kStep = 4 * kSurveyThreads;
  const int chunks = NumChunks(job);
  RingCursor cursor;
  for (int n = 0;; ++n, cursor.Advance(chunks, job.slots)) {
    Await(shared.posted, n);
    Task& task = shared.tasks[n % kTaskSlots];
    if (task.range < 0) return Tell(shared.ready, n);
    const VocabRange range = RangeOfTask(job, task.range, task.row.logits, cursor);
    LogitMax max;
    for (int c = 0; c < chunks; ++c) {
      WaitBarrier(SharedAddress(&shared.full[range.SlotOf(c)]), range.PhaseOf(c));
      const int size = range.size - c * kChunk;
      if (size >= kChunk) {
        const float* const mine = range.Chunk(c) + 4 * thread;
#pragma unroll
        for (int i = 0; i < kChunk; i += kStep) {
          const float4 v = *reinterpret_cast<const float4*>(mine + i);
          max.Add({{v.x, v.y, v.z, v.w}}, 4);
        }
      } else {
        for (int i = 4 * thread; i < size; i += kStep) {
          max.Add(LoadFour(range, c * kChunk + i), size - i);
        }
      }
    }
    const RangeMax mine = max.Get();
    const RangeMax of_warp = {FromAscendingBits(__reduce_max_sync(~0u, AscendingBits(mine.max))),
                              __any_sync(~0u, mine.unfit) != 0};
    if (thread % 32 == 0) task.surveyed[thread / 32] = of_warp;
    if (thread < 32) task.scratch.BeginDraw(task.row.seed, static_cast<uint32_t>(thread));
    Tell(shared.ready, n);
  }
}

// What the worker warps do for a task whose chunks begin at `cursor`.
__device__ void Work(const LogProbJob& job, Task& task, const RingCursor& cursor, Shared& shared) {
  const DeviceLogProbRow& row = task.row;
  const RowPlan& plan = task.plan;
  const int chunks = NumChunks(job);
  const VocabRange range = RangeOfTask(job, task.range, task.row.logits, cursor);
  RangeScratch& scratch = task.scratch;
  const bool first_lane = threadIdx.x % 32 == 0;
  const auto keep = [](int) {};
  const auto release = [&](int slot) {
    __syncwarp();
    if (first_lane) Arrive(SharedAddress(&shared.empty[slot]));
  };
  const RangeMax raw = task.Raw();
  if (plan.separate) {
    const WarpTotals sums =
        Summarise(range, chunks, 1.0f, raw.max, row, true, false, scratch, keep);
    if (first_lane) task.sums[threadIdx.x / 32] = sums;
  }
  float inverse = plan.inverse_temperature;
  RangeMax processed{contract::Mul(raw.max, inverse), false};
  processed.unfit = range.size > 0 && !(processed.max < -kMinusInfinity);
  if (plan.patched) {
    processed = Process(range, row, job.args, inverse, scratch);
    inverse = 1.0f;
  }
  if (threadIdx.x == 0) {
    task.processed = processed;
    if (range.Holds(row.target)) {
      task.target_logit = contract::Mul(range.At(row.target - range.first), inverse);
    }
  }
  const bool needed = plan.draws || !plan.separate;
  const WarpTotals draw = Summarise(range, chunks, inverse, needed ? processed.max : kMinusInfinity,
                                    row, !plan.separate, plan.draws, scratch, release);
  if (first_lane) task.draw[threadIdx.x / 32] = draw;
}

// The warp that writes the tasks' results, and a row's result once all its ranges are done.
__device__ void HandOn(const LogProbJob& job, Shared& shared) {
  for (int n = 0;; ++n) {
    const Task& task = shared.tasks[n % kTaskSlots];
    Await(shared.done, n);
    if (task.range < 0) return;
    const RowPlan& plan = task.plan;
    const RangeMax raw = task.Raw();
    const WarpTotals draw = JoinWarps(task.draw);
    RangeResult result{
        .sum =
            plan.separate ? SumOf(raw.max, JoinWarps(task.sums)) : SumOf(task.processed.max, draw),
        .target_logit = task.target_logit,
        .best = draw.best,
        .best_logit = draw.best_logit,
        .unfit = raw.unfit || task.processed.unfit,
        .alive = task.processed.max > kMinusInfinity,
    };
    if (job.range_results != nullptr) {
      const bool found = plan.draws ? draw.best != 0
                                    : task.row.target >= job.bounds[task.range] &&
                                          task.row.target < job.bounds[task.range + 1];
      if (plan.separate && found) {
        result.raw_logit = task.row.logits[plan.draws ? IdOf(draw.best) : task.row.target];
      }
      if (threadIdx.x % 32 == 0) {
        job.range_results[task.index * job.ranges.count + task.range - job.ranges.first] = result;
      }
      TellByOne(shared.free, n);
      continue;
    }
    RowRecord& record = reinterpret_cast<RowRecord*>(job.args.workspace)[task.index];
    bool last = false;
    if (threadIdx.x % 32 == 0) {
      record.ranges[task.range] = result;
      __threadfence();
      last = atomicInc(&record.arrivals, kRanges - 1) == kRanges - 1;
      if (last) __threadfence();
    }
    if (__any_sync(~0u, last) != 0) {
      FinishRow(job, task.index, task.row, plan, record.ranges[threadIdx.x % kRanges]);
    }
    TellByOne(shared.free, n);
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    PlainLogProbs(const __grid_constant__ LogProbJob job) {
  auto& shared = *reinterpret_cast<Shared*>(shared_memory);
  if (threadIdx.x < kMaxChunks) {
    InitBarrier(SharedAddress(&shared.full[threadIdx.x]), kFetchThreads);
    InitBarrier(SharedAddress(&shared.empty[threadIdx.x]), kRangeWarps);
  }
  if (threadIdx.x < kTaskSlots) {
    InitBarrier(SharedAddress(&shared.posted[threadIdx.x]), kFetchThreads);
    InitBarrier(SharedAddress(&shared.ready[threadIdx.x]), kSurveyThreads);
    InitBarrier(SharedAddress(&shared.done[threadIdx.x]), kRangeWarps);
    InitBarrier(SharedAddress(&shared.free[threadIdx.x]), 1);
  }
  FenceBarrierInit();
  __syncthreads();
  ReleaseSuccessor();
  WaitForPredecessor();
  const int thread = static_cast<int>(threadIdx.x) - kRangeThreads;
  if (thread >= kFetchThreads + kSurveyThreads) return HandOn(job, shared);
  if (thread >= kFetchThreads) return Survey(job, shared, thread - kFetchThreads);
  if (thread >= 0) return Fetch(job, shared);
  RingCursor cursor;
  for (int n = 0;; ++n, cursor.Advance(NumChunks(job), job.slots)) {
    Await(shared.ready, n);
    Task& task = shared.tasks[n % kTaskSlots];
    const bool end = task.range < 0;
    if (!end) Work(job, task, cursor, shared);
    TellByOne(shared.done, n);
    if (end) return;
  }
}

// One warp joins the ranges of one row.
constexpr int kJoinThreads = 128;
__global__ void __launch_bounds__(kJoinThreads)
    JoinLogProbs(const __grid_constant__ LogProbJob job,
                 const __grid_constant__ RankRangeResults results) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const int64_t index = (int64_t{blockIdx.x} * kJoinThreads + threadIdx.x) / 32;
  if (index >= job.args.num_rows) return;
  const DeviceLogProbRow& row = job.args.rows[index];
  if (row.logits == nullptr) return;
  const int range = static_cast<int>(threadIdx.x % kRanges);
  const int each = kRanges / results.num_ranks;
  const auto* const of_rank = reinterpret_cast<const RangeResult*>(results.of_rank[range / each]);
  FinishRow<true>(job, index, row, RowPlan(row, job.args.vocab),
                  of_rank[index * each + range % each]);
}

}  // namespace

size_t RangeResultBytes(int64_t num_rows, int num_ranges) {
  return static_cast<size_t>(num_rows * num_ranges) * sizeof(RangeResult);
}

absl::Status LaunchJoin(const LogProbJob& job, const RankRangeResults& results,
                        const Stream& stream) {
  const int64_t threads = job.args.num_rows * 32;
  const auto blocks = static_cast<unsigned>(CeilDiv(threads, kJoinThreads));
  return Launch(JoinLogProbs, {.blocks = dim3(blocks), .threads = dim3(kJoinThreads)}, stream, job,
                results);
}

size_t PlainLogProbWorkspaceBytes(int64_t num_rows) {
  return static_cast<size_t>(num_rows) * sizeof(RowRecord);
}

absl::Status LaunchPlainLogProbs(const LogProbJob& job, const Stream& stream) {
  ISOBIT_ASSIGN_OR_RETURN(const Card* const card, CardOf(stream));
  const int64_t tasks = job.args.num_rows * job.ranges.count;
  Grid grid;
  grid.blocks = dim3(static_cast<unsigned>(std::min(tasks, kBlocksPerSm * card->multiprocessors)));
  grid.threads = dim3(kThreads);
  LogProbJob sized = job;
  sized.slots = std::clamp(static_cast<int>((kBlockBytes - sizeof(Shared)) / kSlotBytes),
                           NumChunks(job), kMaxChunks);
  grid.shared_bytes = sizeof(Shared) + static_cast<size_t>(sized.slots) * kSlotBytes;
  return Launch(PlainLogProbs, grid, stream, sized);
}

}  // namespace isobit::cuda
