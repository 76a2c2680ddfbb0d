// What lies between the qkv projection and attention, in one pass: q and k heads are normalised and
// rotated; q stays in place, k and v go into the paged cache.
#include <algorithm>
#include <cstdint>

#include "common/base/round_up.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cuda/common/device/alignment.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/device_sequences.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/device/row_columns.cuh"
#include "kernels/cuda/common/rows/heads.cuh"
#include "kernels/cuda/common/rows/rows.h"
#include "kernels/ops/paged_kv.h"
#include "kernels/ops/qkv.h"

namespace isobit::cuda {
namespace {

constexpr int kWarpsOfBlock = 4;
constexpr int64_t kFewHeads = 16384;  // up to so many rows x heads leave lanes of the GPU idle

// The heads of all rows are cut into tasks. A task is a few heads of one row, computed by the lanes
// of one head. All tasks of query heads come first, then those of KV heads; the tasks of a warp are
// of one kind.
struct QkvParams {
  Bf16* qkv;
  int64_t ld;
  int32_t heads;
  const Bf16* q_norm;
  const Bf16* k_norm;
  float eps;
  const float* cosine;
  const float* sine;
  PagedKv kv;
  DeviceSequences sequences;
  int32_t query_tasks;  // of a row
  int32_t kv_tasks;     // of a row
  int32_t kv_per_task;  // KV heads
  int32_t query_warps;  // the first so many warps of the grid have query heads
};

struct Task {
  bool queries;  // query heads, else KV heads; the same for the whole warp
  bool inside;   // false: there is no such row
  int64_t row;
  int32_t index;  // among the row's tasks of its kind
};

__device__ __forceinline__ Task TaskOfHeadLanes(const QkvParams& p, int heads_per_warp, int head) {
  const auto warp = static_cast<int>(blockIdx.x * kWarpsOfBlock + threadIdx.y);
  const bool queries = warp < p.query_warps;
  const auto tasks = static_cast<unsigned>(queries ? p.query_tasks : p.kv_tasks);
  const unsigned task = (queries ? warp : warp - p.query_warps) * heads_per_warp + head;
  const unsigned row = task / tasks;
  const bool inside = row < static_cast<unsigned>(p.sequences.num_rows);
  return {queries, inside, inside ? row : 0, static_cast<int32_t>(task - row * tasks)};
}

// Where a row lies in its sequence and in the cache.
struct Place {
  int32_t position;
  int64_t first;  // offset in the cache of the row's element 0 of KV head 0
};

// False: the row is padding and belongs to no sequence. cached: also finds it in the cache.
__device__ __forceinline__ bool FindPlace(const DeviceSequences& s, const PagedKv& kv, int64_t row,
                                          bool cached, Place* place) {
  const int32_t sequence = s.sequence_of_row[row];
  if (sequence < 0) return false;
  place->position = s.first_position[sequence] + static_cast<int32_t>(row) - s.first_row[sequence];
  if (!cached) return true;
  const uint32_t page = static_cast<uint32_t>(place->position) / kv.page_size;
  const int32_t slot = place->position - static_cast<int32_t>(page) * kv.page_size;
  const int64_t line = int64_t{s.pages[s.first_page[sequence] + page]} * kv.kv_heads;
  place->first = (line * kv.page_size + slot) * kv.head_dim;
  return true;
}

// ---- Heads of whole, aligned vectors

// A task is kQueries query heads, or up to half as many KV heads.
template <int kHeadDim, int kQueries>
__global__ void __launch_bounds__(kWarp* kWarpsOfBlock) QkvKernel(const QkvParams p) {
  constexpr int kLanesEach = kLanesOfHead<kHeadDim>;
  constexpr int kLanes = kHeadDim / kColumns;  // of the head's lanes, those that hold columns
  constexpr int kKeys = (kQueries + 1) / 2;
  ReleaseSuccessor();
  Lane lane = {};
  lane.head = static_cast<int>(threadIdx.x) / kLanesEach;
  const Task task = TaskOfHeadLanes(p, kWarp / kLanesEach, lane.head);
  const int index = static_cast<int>(threadIdx.x) % kLanesEach;
  const bool inside = task.inside && index < kLanes;
  lane.partner = lane.head * kLanesEach + (index + kLanes / 2) % kLanes;
  const int column = index * kColumns;
  const Bf16* norm = task.queries ? p.q_norm : p.k_norm;
  Columns weight = {};
  if (norm != nullptr && inside) weight = LoadColumns(norm + column);
  WaitForPredecessor();

  const int first = task.index * (task.queries ? kQueries : p.kv_per_task);
  Bf16* heads = p.qkv + task.row * p.ld + first * kHeadDim + column;
  if (task.queries) {
    Columns q[kQueries] = {};
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      if (inside && first + i < p.heads) q[i] = LoadColumns(heads + i * kHeadDim);
    }
    Place place;
    const bool used = FindPlace(p.sequences, p.kv, task.row, false, &place) && inside;
    if (used) LoadAngles<kHeadDim>(p.cosine, p.sine, place.position, index, &lane);
    NormaliseAndRotate<kHeadDim>(q, norm != nullptr, weight, p.eps, lane);
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      if (used && first + i < p.heads) StoreColumns(heads + i * kHeadDim, q[i]);
    }
    return;
  }
  const int end = min(first + p.kv_per_task, p.kv.kv_heads);
  heads += p.heads * kHeadDim;
  Columns k[kKeys] = {};
  Columns v[kKeys] = {};
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    if (!inside || first + i >= end) continue;
    k[i] = LoadColumns(heads + i * kHeadDim);
    v[i] = LoadColumns(heads + (p.kv.kv_heads + i) * kHeadDim);
  }
  Place place;
  const bool used = FindPlace(p.sequences, p.kv, task.row, true, &place) && inside;
  if (used) LoadAngles<kHeadDim>(p.cosine, p.sine, place.position, index, &lane);
  NormaliseAndRotate<kHeadDim>(k, norm != nullptr, weight, p.eps, lane);
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    MarkUnfit<kHeadDim>(lane.head, &k[i], &v[i]);
    if (!used || first + i >= end) continue;
    const int64_t offset = place.first + int64_t{first + i} * p.kv.page_size * kHeadDim + column;
    StoreColumns(p.kv.k + offset, k[i]);
    StoreColumns(p.kv.v + offset, v[i]);
  }
}

// ---- Any even head_dim and alignment: a warp takes one query head, or one k head and its v head

__global__ void __launch_bounds__(kWarp* kWarpsOfBlock) RaggedQkvKernel(const QkvParams p) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const Task task = TaskOfHeadLanes(p, 1, 0);
  Place place;
  if (!task.inside || !FindPlace(p.sequences, p.kv, task.row, !task.queries, &place)) return;
  const int lane = static_cast<int>(threadIdx.x);
  const int32_t d = p.kv.head_dim;
  const int32_t half = d / 2;
  const Bf16* norm = task.queries ? p.q_norm : p.k_norm;
  Bf16* head =
      p.qkv + task.row * p.ld + int64_t{task.queries ? 0 : p.heads} * d + int64_t{task.index} * d;

  Bf16* out = head;
  bool poisoned = false;
  if (!task.queries) {
    const Bf16* v = head + int64_t{p.kv.kv_heads} * d;
    bool finite = true;
    for (int i = lane; i < d; i += kWarp) finite = finite && contract::IsFinite(v[i]);
    poisoned = __any_sync(0xffffffffu, !finite);
    const int64_t offset = place.first + int64_t{task.index} * p.kv.page_size * d;
    out = p.kv.k + offset;
    for (int i = lane; i < d; i += kWarp) p.kv.v[offset + i] = poisoned ? Bf16{0} : v[i];
  }
  const float inverse =
      norm == nullptr ? 0.0f : contract::InverseRms(SumOfSquaresOfWarp(head, d), d, p.eps);
  __syncwarp();  // q is overwritten below: every lane must have read what it sums
  for (int i = lane; i < half; i += kWarp) {
    Bf16 first = head[i];
    Bf16 second = head[i + half];
    if (norm != nullptr) {
      first = contract::Normalise(first, inverse, norm[i]);
      second = contract::Normalise(second, inverse, norm[i + half]);
    }
    const int64_t entry = int64_t{place.position} * half + i;
    const contract::Rotated pair = contract::Rotate(first, second, p.cosine[entry], p.sine[entry]);
    out[i] = poisoned ? contract::kPoisonedKey : pair.first;
    out[i + half] = poisoned ? contract::kPoisonedKey : pair.second;
  }
}

// Launches `kernel` on tasks of so many query or KV heads, heads_per_warp tasks to a warp.
absl::Status LaunchTasks(void (*kernel)(QkvParams), int queries_per_task, int kv_per_task,
                         int heads_per_warp, QkvParams params, const Stream& stream) {
  const auto count = [](int64_t n, int64_t unit) { return static_cast<int32_t>(CeilDiv(n, unit)); };
  const int64_t rows = params.sequences.num_rows;
  params.query_tasks = count(params.heads, queries_per_task);
  params.kv_tasks = count(params.kv.kv_heads, kv_per_task);
  params.kv_per_task = kv_per_task;
  params.query_warps = count(rows * params.query_tasks, heads_per_warp);
  const int32_t warps = params.query_warps + count(rows * params.kv_tasks, heads_per_warp);
  const Grid grid = {.blocks = dim3(static_cast<unsigned>(count(warps, kWarpsOfBlock))),
                     .threads = dim3(kWarp, kWarpsOfBlock)};
  return Launch(kernel, grid, stream, params);
}

template <int kHeadDim>
absl::Status LaunchHeads(const QkvParams& params, const Stream& stream) {
  constexpr int kHeadsPerWarp = kWarp / kLanesOfHead<kHeadDim>;
  const int64_t heads_in_all = int64_t{params.sequences.num_rows} * params.heads;
  if (params.heads < 4 || heads_in_all <= kFewHeads) {
    return LaunchTasks(QkvKernel<kHeadDim, 1>, 1, 1, kHeadsPerWarp, params, stream);
  }
  return LaunchTasks(QkvKernel<kHeadDim, 4>, 4, std::clamp(params.kv.kv_heads, 1, 2), kHeadsPerWarp,
                     params, stream);
}

}  // namespace

// Reads args.sequences.device. Leaves the k heads of args.qkv unchanged: attention reads them from
// the cache.
absl::Status Run(const QkvArgs& args, const Stream& stream) {
  const QkvParams params = {.qkv = args.qkv,
                            .ld = args.ld,
                            .heads = args.heads,
                            .q_norm = args.q_norm,
                            .k_norm = args.k_norm,
                            .eps = args.eps,
                            .cosine = args.cosine,
                            .sine = args.sine,
                            .kv = args.kv,
                            .sequences = *args.sequences.device,
                            .query_tasks = 0,
                            .kv_tasks = 0,
                            .kv_per_task = 0,
                            .query_warps = 0};
  const bool aligned = args.ld % kColumns == 0 && Aligned16(args.qkv, args.kv.k, args.kv.v) &&
                       Aligned16(args.q_norm, args.k_norm) && Aligned16(args.cosine, args.sine);
  switch (aligned ? args.kv.head_dim : 0) {
    case 32:
      return LaunchHeads<32>(params, stream);
    case 64:
      return LaunchHeads<64>(params, stream);
    case 80:
      return LaunchHeads<80>(params, stream);
    case 96:
      return LaunchHeads<96>(params, stream);
    case 128:
      return LaunchHeads<128>(params, stream);
    case 192:
      return LaunchHeads<192>(params, stream);
    case 256:
      return LaunchHeads<256>(params, stream);
    default:
      return LaunchTasks(RaggedQkvKernel, 1, 1, 1, params, stream);
  }
}

}  // namespace isobit::cuda
