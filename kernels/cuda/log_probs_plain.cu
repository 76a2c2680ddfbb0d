// Rows whose tokens need no order: each range is one task, and the block that ends a row's last
// task joins its ranges. Blocks are persistent, with one warp that fetches the next task's logits
// chunk by chunk as the others are done with the present one's, so that memory never waits for
// arithmetic.
#include <algorithm>

#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/log_prob_row.cuh"
#include "kernels/cuda/device_info.h"
#include "kernels/cuda/log_probs_kernels.h"

namespace isobit::cuda {
namespace {

constexpr int kBlocksPerSm = 2;
constexpr size_t kBlockBytes = (228 / kBlocksPerSm - 1) * 1024;  // shared memory that each can have
constexpr size_t kChunkBytes = kChunk * sizeof(float);
constexpr int kFetchThreads = 32;
constexpr int kThreads = kRangeThreads + kFetchThreads + 32;

// A row's place in the workspace.
struct RowRecord {
  RangeResult ranges[kRanges];
  unsigned arrivals;  // of finished ranges; zero between launches
};

// A task's parameters and what the workers find out.
struct Task {
  DeviceLogProbRow row;
  RowPlan plan;
  int64_t index;  // of the row
  int32_t range;  // -1: there are no more
  RangeMax raw;
  RangeMax processed;
  float target_logit;
  WarpTotals sums[kRangeWarps];
  WarpTotals draw[kRangeWarps];  // the sums' too, unless RowPlan::separate
};

// Tasks that a block has in hand: one is fetched and one worked on while others are handed on.
constexpr int kPlaces = 4;

// In front of the ring of chunks. The n-th task that a block works on lies in place n % kPlaces,
// and its chunks follow those of the one before.
struct alignas(16) Shared {
  RangeScratch scratch;
  uint64_t empty[kMaxChunks];  // barriers, one a slot: it may be overwritten
  uint64_t full[kPlaces];      // the task and its logits have arrived
  uint64_t done[kPlaces];      // the workers are done with the task
  uint64_t free[kPlaces];      // its place may be overwritten
  Task tasks[kPlaces];
};
extern __shared__ __align__(16) std::byte shared_memory[];

__device__ float* Ring() { return reinterpret_cast<float*>(shared_memory + sizeof(Shared)); }

// Waits until task n's place has served the task before it there.
__device__ void AwaitFree(Shared& shared, int n) {
  if (n < kPlaces) return;
  WaitBarrier(SharedAddress(&shared.free[n % kPlaces]), static_cast<uint32_t>(n / kPlaces - 1) % 2);
}

// The fetching warp.
__device__ void Fetch(const LogProbJob& job, Shared& shared) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int chunks = NumChunks(job);
  const int64_t num_tasks = job.args.num_rows * kRanges;
  RingPlace place;
  int n = 0;
  for (int64_t t = blockIdx.x;; t += gridDim.x) {
    const bool end = t >= num_tasks;
    const DeviceLogProbRow* row = &job.args.rows[end ? 0 : t / kRanges];
    const float* logits = end ? nullptr : row->logits;
    const RowPlan plan(*row, job.args.vocab);
    if (!end && (logits == nullptr || IsRanked(plan, *row))) continue;
    AwaitFree(shared, n);
    Task& task = shared.tasks[n % kPlaces];
    static_assert(sizeof(DeviceLogProbRow) % 4 == 0 && sizeof(DeviceLogProbRow) <= 4 * 32);
    if (lane < static_cast<int>(sizeof(DeviceLogProbRow) / 4)) {
      reinterpret_cast<uint32_t*>(&task.row)[lane] = reinterpret_cast<const uint32_t*>(row)[lane];
    }
    if (lane == 0) {
      task.plan = plan;
      task.index = t / kRanges;
      task.range = end ? -1 : static_cast<int32_t>(t % kRanges);
    }
    const uint32_t full = SharedAddress(&shared.full[n % kPlaces]);
    if (end) {
      for (int c = 0; c < chunks; ++c) Arrive(full);
      return;
    }
    const VocabRange range = RangeOf(job, static_cast<int>(t % kRanges), Ring(), place);
    for (int c = 0; c < chunks; ++c) {
      WaitBarrier(SharedAddress(&shared.empty[range.SlotOf(c)]), range.PhaseOf(c) ^ 1);
      __syncwarp();
      StartChunk<kFetchThreads>(range, logits, c, lane, full);
    }
    place.Advance(chunks, job.slots);
    ++n;
  }
}

// The workers' part of a task whose chunks begin at `place`.
__device__ void Work(const LogProbJob& job, Task& task, const RingPlace& place, Shared& shared) {
  const DeviceLogProbRow& row = task.row;
  const RowPlan& plan = task.plan;
  const int chunks = NumChunks(job);
  const VocabRange range = RangeOf(job, task.range, Ring(), place);
  RangeScratch& scratch = shared.scratch;
  const bool first_lane = threadIdx.x % 32 == 0;
  const auto keep = [](int) {};
  const auto release = [&](int slot) {
    __syncwarp();
    if (first_lane) Arrive(SharedAddress(&shared.empty[slot]));
  };
  const RangeMax raw = MaxOfLogits(range, row.seed, scratch);
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
    task.raw = raw;
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

// The warp that hands results on.
__device__ void HandOn(const LogProbJob& job, Shared& shared) {
  for (int n = 0;; ++n) {
    const Task& task = shared.tasks[n % kPlaces];
    WaitBarrier(SharedAddress(&shared.done[n % kPlaces]), static_cast<uint32_t>(n / kPlaces) % 2);
    if (task.range < 0) return;
    const RowPlan& plan = task.plan;
    const WarpTotals draw = JoinWarps(task.draw);
    RangeResult result{
        .sum = plan.separate ? SumOf(task.raw.max, JoinWarps(task.sums))
                             : SumOf(task.processed.max, draw),
        .target_logit = task.target_logit,
        .best = draw.best,
        .best_logit = draw.best_logit,
        .unfit = task.raw.unfit || task.processed.unfit,
        .alive = task.processed.max > kMinusInfinity,
    };
    RowRecord& record = reinterpret_cast<RowRecord*>(job.args.workspace)[task.index];
    bool last = false;
    if (threadIdx.x % 32 == 0) {
      record.ranges[task.range] = result;
      __threadfence();
      last = atomicInc(&record.arrivals, kRanges - 1) == kRanges - 1;
      if (last) __threadfence();
    }
    if (__any_sync(~0u, last) != 0) FinishRow(job, task.index, task.row, plan, record.ranges);
    __syncwarp();
    if (threadIdx.x % 32 == 0) Arrive(SharedAddress(&shared.free[n % kPlaces]));
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    PlainLogProbs(const __grid_constant__ LogProbJob job) {
  auto& shared = *reinterpret_cast<Shared*>(shared_memory);
  if (threadIdx.x < kMaxChunks) {
    InitBarrier(SharedAddress(&shared.empty[threadIdx.x]), kRangeWarps);
  }
  if (threadIdx.x < kPlaces) {
    InitBarrier(SharedAddress(&shared.full[threadIdx.x]),
                static_cast<uint32_t>(NumChunks(job)) * kFetchThreads);
    InitBarrier(SharedAddress(&shared.done[threadIdx.x]), kRangeWarps);
    InitBarrier(SharedAddress(&shared.free[threadIdx.x]), 1);
  }
  FenceBarrierInit();
  __syncthreads();
  ReleaseSuccessor();
  WaitForPredecessor();
  if (threadIdx.x >= kRangeThreads + kFetchThreads) return HandOn(job, shared);
  if (threadIdx.x >= kRangeThreads) return Fetch(job, shared);
  RingPlace place;
  for (int n = 0;; ++n) {
    WaitBarrier(SharedAddress(&shared.full[n % kPlaces]), static_cast<uint32_t>(n / kPlaces) % 2);
    Task& task = shared.tasks[n % kPlaces];
    const bool end = task.range < 0;
    if (!end) Work(job, task, place, shared);
    __syncwarp();
    if (threadIdx.x % 32 == 0) Arrive(SharedAddress(&shared.done[n % kPlaces]));
    if (end) return;
    place.Advance(NumChunks(job), job.slots);
  }
}

}  // namespace

size_t PlainLogProbWorkspaceBytes(int64_t num_rows) {
  return static_cast<size_t>(num_rows) * sizeof(RowRecord);
}

absl::Status LaunchPlainLogProbs(const LogProbJob& job, const Stream& stream) {
  int device = 0;
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  const absl::StatusOr<DeviceInfo> info = GetDeviceInfo(device);
  if (!info.ok()) return info.status();
  const int64_t tasks = job.args.num_rows * kRanges;
  Grid grid;
  grid.blocks = dim3(static_cast<unsigned>(std::min<int64_t>(tasks, kBlocksPerSm * info->num_sms)));
  grid.threads = dim3(kThreads);
  LogProbJob sized = job;
  sized.slots = std::clamp(static_cast<int>((kBlockBytes - sizeof(Shared)) / kChunkBytes),
                           NumChunks(job), kMaxChunks);
  grid.shared_bytes = sizeof(Shared) + static_cast<size_t>(sized.slots) * kChunkBytes;
  return Launch(PlainLogProbs, grid, stream, sized);
}

}  // namespace isobit::cuda
