// Between the qkv projection and attention, in one pass: q and k heads are normalised and rotated,
// q stays, k and v go into the paged cache.
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
  int32_t query_tasks;  // of a row: warps that take query heads
  int32_t tasks;        // and all of its warps
};

// What one warp works on. `row` is -1 if there is nothing.
struct Task {
  int64_t row;
  int32_t index;
};

__device__ __forceinline__ Task TaskOfWarp(const QkvParams& p) {
  const unsigned warp = blockIdx.x * kWarpsOfBlock + threadIdx.y;
  const unsigned tasks = static_cast<unsigned>(p.tasks);
  const unsigned row = warp / tasks;
  if (row >= static_cast<unsigned>(p.sequences.num_rows)) return {-1, 0};
  return {row, static_cast<int32_t>(warp - row * tasks)};
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

// This lane's angles, signed so that both halves of a pair are the same expression.
struct Angles {
  float cosine[kColumns];
  float sine[kColumns];  // negative in the first half
};

// contract::Normalise, if there is a weight, and contract::Rotate. Every lane of the warp takes
// part; those beyond the head hold +0.
template <int kGroup>
__device__ __forceinline__ Columns NormaliseAndRotate(Columns x, bool normalise,
                                                      const Columns& weight, float eps,
                                                      int32_t head_dim, int partner,
                                                      const Angles& angles) {
  if (normalise) {
    const float sum = TreeOfLanes<kGroup>(SumOfSquares(x));
    x = NormaliseColumns(x, contract::InverseRms(sum, head_dim, eps), weight);
  }
  Columns out;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    const uint32_t mine = x.pairs[i];
    const uint32_t other = __shfl_sync(0xffffffffu, mine, partner);
    out.pairs[i] = PackBf16(contract::Fma(LowOf(mine), angles.cosine[2 * i],
                                          contract::Mul(LowOf(other), angles.sine[2 * i])),
                            contract::Fma(HighOf(mine), angles.cosine[2 * i + 1],
                                          contract::Mul(HighOf(other), angles.sine[2 * i + 1])));
  }
  return out;
}

__device__ __forceinline__ bool AllFinite(const Columns& x) {
  bool finite = true;
#pragma unroll
  for (const uint32_t pair : x.pairs) {
    finite = finite && (pair & 0x7f80u) != 0x7f80u && (pair & 0x7f800000u) != 0x7f800000u;
  }
  return finite;
}

// A warp takes kQueries query heads of each group of lanes, or a group's k head with its v head.
template <int kGroup, int kQueries>
__global__ void __launch_bounds__(kWarp* kWarpsOfBlock) QkvKernel(const QkvParams p) {
  constexpr int kGroups = kWarp / kGroup;
  constexpr int kVectors = kQueries > 2 ? kQueries : 2;
  ReleaseSuccessor();
  const Task task = TaskOfWarp(p);
  const int lane = static_cast<int>(threadIdx.x) % kGroup;
  const int group = static_cast<int>(threadIdx.x) / kGroup;
  const int lanes = p.kv.head_dim / kColumns;
  const bool inside = lane < lanes;
  const bool first_half = lane < lanes / 2;
  const int partner = group * kGroup + (first_half ? lane + lanes / 2
                                        : inside   ? lane - lanes / 2
                                                   : lane);
  const int column = lane * kColumns;

  const bool queries = task.index < p.query_tasks;
  const Bf16* norm = queries ? p.q_norm : p.k_norm;
  Columns weight = {};
  if (norm != nullptr && inside) weight = LoadColumns(norm + column);
  WaitForPredecessor();
  if (task.row < 0) return;

  // Heads of this group: of queries, every kGroups-th; of a KV head, k and v.
  const int first_head =
      (queries ? task.index * kQueries : task.index - p.query_tasks) * kGroups + group;
  const int end_head = queries ? p.heads : p.kv.kv_heads;
  Bf16* row = p.qkv + task.row * p.ld + column;
  const int head_of_row = queries ? first_head : p.heads + first_head;
  const int step = queries ? kGroups : p.kv.kv_heads;
  const int count = queries ? kQueries : 2;
  Columns x[kVectors] = {};
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int limit = queries ? first_head + i * step : first_head;
    if (i < count && inside && limit < end_head) {
      x[i] = LoadColumns(row + int64_t{head_of_row + i * step} * p.kv.head_dim);
    }
  }

  Place place;
  if (!FindPlace(p.sequences, task.row, &place)) return;
  Angles angles = {};
  if (inside) {
    const int half = p.kv.head_dim / 2;
    const int64_t entry = place.position * half + (first_half ? column : column - half);
    LoadFloats(p.cosine + entry, angles.cosine);
    LoadFloats(p.sine + entry, angles.sine);
#pragma unroll
    for (float& sine : angles.sine) sine = first_half ? -sine : sine;
  }

  if (queries) {
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      const Columns q = NormaliseAndRotate<kGroup>(x[i], norm != nullptr, weight, p.eps,
                                                   p.kv.head_dim, partner, angles);
      const int head = first_head + i * kGroups;
      if (inside && head < end_head) StoreColumns(row + int64_t{head} * p.kv.head_dim, q);
    }
    return;
  }
  Columns k = NormaliseAndRotate<kGroup>(x[0], norm != nullptr, weight, p.eps, p.kv.head_dim,
                                         partner, angles);
  const unsigned unfit = __ballot_sync(0xffffffffu, !AllFinite(x[1]));
  if (!inside || first_head >= end_head) return;
  constexpr unsigned kGroupMask = kGroup == 32 ? ~0u : (1u << kGroup % 32) - 1;
  if ((unfit >> (group * kGroup) & kGroupMask) != 0) {
    constexpr uint32_t kPoisonedPair = contract::kPoisonedKey * 0x10001u;
    k = {{kPoisonedPair, kPoisonedPair, kPoisonedPair, kPoisonedPair}};
    x[1] = {};
  }
  const int64_t offset = CacheOffset(p.kv, place, first_head) + column;
  StoreColumns(p.kv.k + offset, k);
  StoreColumns(p.kv.v + offset, x[1]);
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
  ReleaseSuccessor();
  WaitForPredecessor();
  const Task task = TaskOfWarp(p);
  Place place;
  if (task.row < 0 || !FindPlace(p.sequences, task.row, &place)) return;
  const int lane = static_cast<int>(threadIdx.x);
  const int32_t d = p.kv.head_dim;
  const int32_t half = d / 2;
  const bool query = task.index < p.heads;
  const Bf16* norm = query ? p.q_norm : p.k_norm;
  Bf16* head = p.qkv + task.row * p.ld + int64_t{task.index} * d;

  Bf16* out = head;
  bool poisoned = false;
  if (!query) {
    const Bf16* v = head + int64_t{p.kv.kv_heads} * d;
    bool finite = true;
    for (int i = lane; i < d; i += kWarp) finite = finite && contract::IsFinite(v[i]);
    poisoned = __any_sync(0xffffffffu, !finite);
    const int64_t offset = CacheOffset(p.kv, place, task.index - p.heads);
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

absl::Status LaunchTasks(void (*kernel)(QkvParams), int64_t query_tasks, int64_t kv_tasks,
                         QkvParams params, const Stream& stream) {
  params.query_tasks = static_cast<int32_t>(query_tasks);
  params.tasks = static_cast<int32_t>(query_tasks + kv_tasks);
  const int64_t warps = int64_t{params.sequences.num_rows} * params.tasks;
  const Grid grid = {
      .blocks = dim3(static_cast<unsigned>((warps + kWarpsOfBlock - 1) / kWarpsOfBlock)),
      .threads = dim3(kWarp, kWarpsOfBlock)};
  return Launch(kernel, grid, stream, params);
}

template <int kGroup>
absl::Status LaunchGroups(const QkvParams& params, const Stream& stream) {
  constexpr int64_t kGroups = kWarp / kGroup;
  constexpr int64_t kQueries = 4;
  const auto tasks_of = [](int64_t heads, int64_t of_task) {
    return (heads + of_task - 1) / of_task;
  };
  const int64_t kv_tasks = tasks_of(params.kv.kv_heads, kGroups);
  if (params.heads < kQueries * kGroups ||
      int64_t{params.sequences.num_rows} * params.heads <= kFewHeads) {
    return LaunchTasks(QkvKernel<kGroup, 1>, tasks_of(params.heads, kGroups), kv_tasks, params,
                       stream);
  }
  return LaunchTasks(QkvKernel<kGroup, kQueries>, tasks_of(params.heads, kQueries * kGroups),
                     kv_tasks, params, stream);
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
                            .tasks = 0};
  const int32_t d = args.kv.head_dim;
  const bool aligned = d % (2 * kColumns) == 0 && d <= kMaxHeadDim && args.ld % kColumns == 0 &&
                       Aligned16(args.qkv, args.kv.k, args.kv.v) &&
                       Aligned16(args.q_norm, args.k_norm) && Aligned16(args.cosine, args.sine);
  if (!aligned) return LaunchTasks(RaggedQkvKernel, args.heads, args.kv.kv_heads, params, stream);
  if (d <= 2 * kColumns) return LaunchGroups<2>(params, stream);
  if (d <= 4 * kColumns) return LaunchGroups<4>(params, stream);
  if (d <= 8 * kColumns) return LaunchGroups<8>(params, stream);
  if (d <= 16 * kColumns) return LaunchGroups<16>(params, stream);
  return LaunchGroups<32>(params, stream);
}

}  // namespace isobit::cuda
