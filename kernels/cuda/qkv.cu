// Between the qkv projection and attention, in one pass: q and k heads are normalised and rotated,
// q stays, k and v go into the paged cache.
#include <algorithm>
#include <cstdint>

#include "kernels/contract/row_functions.h"
#include "kernels/cuda/alignment.h"
#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/device/row_columns.cuh"
#include "kernels/cuda/row_kernels.h"
#include "kernels/cuda/sequences.h"

namespace isobit::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kWarpsOfBlock = 4;
constexpr int kMaxHeadDim = kWarp * kColumns;  // of the kernel that holds a head in one warp
constexpr int64_t kFewHeads = 16384;           // rows x heads that leave a machine's lanes idle

// The heads of all rows are cut into tasks of a few heads of one row: first all tasks of q heads,
// then all of KV heads. A task is a group of lanes; a warp's groups are of one kind.
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
  int32_t query_warps;  // of the grid: the warps before this one have q heads
};

struct Task {
  bool queries;  // or KV heads; the same for the whole warp
  bool inside;   // false: there is no such row
  int64_t row;
  int32_t index;  // among the row's tasks of its kind
};

__device__ __forceinline__ Task TaskOfGroup(const QkvParams& p, int groups, int group) {
  const auto warp = static_cast<int>(blockIdx.x * kWarpsOfBlock + threadIdx.y);
  const bool queries = warp < p.query_warps;
  const auto tasks = static_cast<unsigned>(queries ? p.query_tasks : p.kv_tasks);
  const unsigned task = (queries ? warp : warp - p.query_warps) * groups + group;
  const unsigned row = task / tasks;
  const bool inside = row < static_cast<unsigned>(p.sequences.num_rows);
  return {queries, inside, inside ? row : 0, static_cast<int32_t>(task - row * tasks)};
}

struct Place {
  int64_t position;
  const int32_t* pages;  // of the row's sequence
};

// False: the row is padding, of no sequence.
__device__ __forceinline__ bool FindPlace(const DeviceSequences& s, int64_t row, Place* place) {
  const int32_t sequence = s.sequence_of_row[row];
  if (sequence < 0) return false;
  place->position = s.first_position[sequence] + (row - s.first_row[sequence]);
  place->pages = s.pages + s.first_page[sequence];
  return true;
}

__device__ __forceinline__ int64_t CacheOffset(const PagedKv& kv, const Place& place,
                                               int32_t kv_head) {
  const auto position = static_cast<uint32_t>(place.position);
  const auto page_size = static_cast<uint32_t>(kv.page_size);
  const uint32_t page = position / page_size;
  const int64_t line = int64_t{place.pages[page]} * kv.kv_heads + kv_head;
  return (line * kv.page_size + (position - page * page_size)) * kv.head_dim;
}

// ---- Heads of whole, aligned vectors: lane l of a group of kGroup holds columns 8l .. 8l+7

// What a lane needs to know of its place in its group and of the row's position.
struct Lane {
  int group;
  int partner;  // the lane of the warp that holds the other halves of this one's pairs
  int column;   // of the head
  bool inside;  // the head has this column, and the row is one
  float cosine[kColumns];
  float sine[kColumns];  // negative in the first half: both halves of a pair are one expression
};

// contract::InverseRms of every head. Its operations cost more than all else that a lane does for a
// head, so each lane computes one head's and hands it round the group.
template <int kGroup, int kHeads>
__device__ __forceinline__ void InverseRmsOfHeads(float (&sums)[kHeads], int lane, int group,
                                                  int32_t head_dim, float eps) {
  if constexpr (kHeads == 1 || kGroup < kHeads) {
#pragma unroll
    for (float& sum : sums) sum = contract::InverseRms(sum, head_dim, eps);
  } else {
    float mine = sums[0];
#pragma unroll
    for (int i = 1; i < kHeads; ++i) mine = lane % kHeads == i ? sums[i] : mine;
    mine = contract::InverseRms(mine, head_dim, eps);
#pragma unroll
    for (int i = 0; i < kHeads; ++i) sums[i] = __shfl_sync(0xffffffffu, mine, group * kGroup + i);
  }
}

// contract::Normalise, if there is a weight, and contract::Rotate of each head. Every lane of the
// warp takes part; those beyond a head hold +0.
template <int kGroup, int kHeads>
__device__ __forceinline__ void NormaliseAndRotate(Columns (&x)[kHeads], bool normalise,
                                                   const Columns& weight, float eps,
                                                   int32_t head_dim, const Lane& lane) {
  if (normalise) {
    float inverse[kHeads];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) inverse[i] = TreeOfLanes<kGroup>(SumOfSquares(x[i]));
    InverseRmsOfHeads<kGroup>(inverse, static_cast<int>(threadIdx.x), lane.group, head_dim, eps);
#pragma unroll
    for (int i = 0; i < kHeads; ++i) x[i] = NormaliseColumns(x[i], inverse[i], weight);
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const uint32_t mine = x[h].pairs[i];
      const uint32_t other = __shfl_sync(0xffffffffu, mine, lane.partner);
      x[h].pairs[i] = PackBf16(contract::Fma(LowOf(mine), lane.cosine[2 * i],
                                             contract::Mul(LowOf(other), lane.sine[2 * i])),
                               contract::Fma(HighOf(mine), lane.cosine[2 * i + 1],
                                             contract::Mul(HighOf(other), lane.sine[2 * i + 1])));
    }
  }
}

__device__ __forceinline__ bool AllFinite(const Columns& x) {
  bool finite = true;
#pragma unroll
  for (const uint32_t pair : x.pairs) {
    finite = finite && (pair & 0x7f80u) != 0x7f80u && (pair & 0x7f800000u) != 0x7f800000u;
  }
  return finite;
}

// Writes a head's k and v into the cache, or the marks of a head whose v is not finite.
template <int kGroup>
__device__ __forceinline__ void CacheHead(const PagedKv& kv, const Place& place, int head,
                                          const Lane& lane, bool store, Columns k, Columns v) {
  constexpr unsigned kGroupMask = kGroup == kWarp ? ~0u : (1u << kGroup % kWarp) - 1;
  const unsigned unfit = __ballot_sync(0xffffffffu, store && !AllFinite(v));
  if (!store) return;
  if ((unfit >> (lane.group * kGroup) & kGroupMask) != 0) {
    constexpr uint32_t kPoisonedPair = contract::kPoisonedKey * 0x10001u;
    k = {{kPoisonedPair, kPoisonedPair, kPoisonedPair, kPoisonedPair}};
    v = {};
  }
  const int64_t offset = CacheOffset(kv, place, head) + lane.column;
  StoreColumns(kv.k + offset, k);
  StoreColumns(kv.v + offset, v);
}

// A task is kQueries query heads, or up to half as many KV heads.
template <int kGroup, int kQueries>
__global__ void __launch_bounds__(kWarp* kWarpsOfBlock) QkvKernel(const QkvParams p) {
  constexpr int kKeys = (kQueries + 1) / 2;
  Lane lane = {};
  lane.group = static_cast<int>(threadIdx.x) / kGroup;
  const Task task = TaskOfGroup(p, kWarp / kGroup, lane.group);
  const int32_t d = p.kv.head_dim;
  const int lanes = d / kColumns;
  const int index = static_cast<int>(threadIdx.x) % kGroup;
  const bool first_half = index < lanes / 2;
  const int other = first_half ? index + lanes / 2 : index - lanes / 2;
  lane.partner = lane.group * kGroup + (index < lanes ? other : index);
  lane.column = index * kColumns;
  lane.inside = task.inside && index < lanes;
  const Bf16* norm = task.queries ? p.q_norm : p.k_norm;
  Columns weight = {};
  if (norm != nullptr && lane.inside) weight = LoadColumns(norm + lane.column);
  WaitForPredecessor();
  ReleaseSuccessor();

  Bf16* row = p.qkv + task.row * p.ld + lane.column;
  Place place = {};
  const bool used = FindPlace(p.sequences, task.row, &place) && lane.inside;
  const auto load_angles = [&] {
    if (!used) return;
    const int64_t entry = place.position * (d / 2) + (first_half ? index : other) * kColumns;
    LoadFloats(p.cosine + entry, lane.cosine);
    LoadFloats(p.sine + entry, lane.sine);
#pragma unroll
    for (float& sine : lane.sine) sine = first_half ? -sine : sine;
  };
  if (task.queries) {
    const int first = task.index * kQueries;
    Columns q[kQueries] = {};
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      if (lane.inside && first + i < p.heads) q[i] = LoadColumns(row + int64_t{first + i} * d);
    }
    load_angles();
    NormaliseAndRotate<kGroup>(q, norm != nullptr, weight, p.eps, d, lane);
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      if (used && first + i < p.heads) StoreColumns(row + int64_t{first + i} * d, q[i]);
    }
    return;
  }
  const int first = task.index * p.kv_per_task;
  const int end = min(first + p.kv_per_task, p.kv.kv_heads);
  Columns k[kKeys] = {};
  Columns v[kKeys] = {};
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    if (!lane.inside || first + i >= end) continue;
    k[i] = LoadColumns(row + int64_t{p.heads + first + i} * d);
    v[i] = LoadColumns(row + int64_t{p.heads + p.kv.kv_heads + first + i} * d);
  }
  load_angles();
  NormaliseAndRotate<kGroup>(k, norm != nullptr, weight, p.eps, d, lane);
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    CacheHead<kGroup>(p.kv, place, first + i, lane, used && first + i < end, k[i], v[i]);
  }
}

// ---- Any even head_dim and alignment: a warp takes one query head, or one k head and its v head

__device__ float SumOfSquaresOfWarp(const Bf16* x, int32_t n) {
  contract::TreeSum tree;
  const int lane = static_cast<int>(threadIdx.x);
  for (int begin = 0; begin < n; begin += kWarp * contract::kNormLeaf) {
    const int first = begin + lane * contract::kNormLeaf;
    const int left = min(n - first, contract::kNormLeaf);
    tree.Push(TreeOfLanes(left > 0 ? contract::SumOfSquares(x + first, left) : 0.0f));
  }
  return tree.Total();
}

__global__ void __launch_bounds__(kWarp* kWarpsOfBlock) RaggedQkvKernel(const QkvParams p) {
  WaitForPredecessor();
  ReleaseSuccessor();
  const Task task = TaskOfGroup(p, 1, 0);
  Place place;
  if (!task.inside || !FindPlace(p.sequences, task.row, &place)) return;
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
    const int64_t offset = CacheOffset(p.kv, place, task.index);
    out = p.kv.k + offset;
    for (int i = lane; i < d; i += kWarp) p.kv.v[offset + i] = poisoned ? Bf16{0} : v[i];
  }
  const float inverse =
      norm == nullptr ? 0.0f : contract::InverseRms(SumOfSquaresOfWarp(head, d), d, p.eps);
  __syncwarp();  // q is overwritten: every lane has read what it sums
  for (int i = lane; i < half; i += kWarp) {
    Bf16 first = head[i];
    Bf16 second = head[i + half];
    if (norm != nullptr) {
      first = contract::Normalise(first, inverse, norm[i]);
      second = contract::Normalise(second, inverse, norm[i + half]);
    }
    const int64_t entry = place.position * half + i;
    const contract::Rotated pair = contract::Rotate(first, second, p.cosine[entry], p.sine[entry]);
    out[i] = poisoned ? contract::kPoisonedKey : pair.first;
    out[i + half] = poisoned ? contract::kPoisonedKey : pair.second;
  }
}

// Launches `kernel` on tasks of so many heads, groups of which make a warp.
absl::Status LaunchTasks(void (*kernel)(QkvParams), int queries_per_task, int kv_per_task,
                         int groups, QkvParams params, const Stream& stream) {
  const auto count = [](int64_t n, int64_t unit) {
    return static_cast<int32_t>((n + unit - 1) / unit);
  };
  const int64_t rows = params.sequences.num_rows;
  params.query_tasks = count(params.heads, queries_per_task);
  params.kv_tasks = count(params.kv.kv_heads, kv_per_task);
  params.kv_per_task = kv_per_task;
  params.query_warps = count(rows * params.query_tasks, groups);
  const int32_t warps = params.query_warps + count(rows * params.kv_tasks, groups);
  const Grid grid = {.blocks = dim3(static_cast<unsigned>(count(warps, kWarpsOfBlock))),
                     .threads = dim3(kWarp, kWarpsOfBlock)};
  return Launch(kernel, grid, stream, params);
}

template <int kGroup>
absl::Status LaunchGroups(const QkvParams& params, const Stream& stream) {
  constexpr int kGroups = kWarp / kGroup;
  const int64_t heads_in_all = int64_t{params.sequences.num_rows} * params.heads;
  if (params.heads < 4 || heads_in_all <= kFewHeads) {
    return LaunchTasks(QkvKernel<kGroup, 1>, 1, 1, kGroups, params, stream);
  }
  return LaunchTasks(QkvKernel<kGroup, 4>, 4, std::clamp(params.kv.kv_heads, 1, 2), kGroups, params,
                     stream);
}

}  // namespace

absl::Status LaunchQkv(const QkvArgs& args, const Stream& stream) {
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
  const int32_t d = args.kv.head_dim;
  const bool aligned = d % (2 * kColumns) == 0 && d <= kMaxHeadDim && args.ld % kColumns == 0 &&
                       Aligned16(args.qkv, args.kv.k, args.kv.v) &&
                       Aligned16(args.q_norm, args.k_norm) && Aligned16(args.cosine, args.sine);
  if (!aligned) return LaunchTasks(RaggedQkvKernel, 1, 1, 1, params, stream);
  if (d <= 2 * kColumns) return LaunchGroups<2>(params, stream);
  if (d <= 4 * kColumns) return LaunchGroups<4>(params, stream);
  if (d <= 8 * kColumns) return LaunchGroups<8>(params, stream);
  if (d <= 16 * kColumns) return LaunchGroups<16>(params, stream);
  return LaunchGroups<32>(params, stream);
}

}  // namespace isobit::cuda
