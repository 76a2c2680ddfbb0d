// What lies between the qkv projection and attention in training: q and k heads are normalised and
// rotated; q, k and v go into arrays of their own, and a KV head with a v that is not finite is
// marked as in serving (C6).
#include <cstdint>

#include "common/base/round_up.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cuda/common/device/alignment.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/device/row_columns.cuh"
#include "kernels/cuda/common/rows/heads.cuh"
#include "kernels/cuda/common/rows/training_heads.cuh"
#include "kernels/ops/qkv.h"

namespace isobit::cuda {
namespace {

constexpr int kWarpsOfBlock = 4;
constexpr int kHeads = 4;  // of a lane

struct WarpTask {
  int64_t row;
  int group;
};
__device__ __forceinline__ WarpTask TaskOfWarp(int groups) {
  const unsigned warp = blockIdx.x * kWarpsOfBlock + threadIdx.y;
  const unsigned row = warp / static_cast<unsigned>(groups);
  return {row, static_cast<int>(warp - row * static_cast<unsigned>(groups))};
}

template <int kHeadDim>
__global__ void __launch_bounds__(kWarp* kWarpsOfBlock)
    TrainingQkvKernel(const TrainingQkvArgs a, const HeadGroups groups, int groups_of_row) {
  constexpr int kLanesEach = kLanesOfHead<kHeadDim>;
  constexpr int kLanes = kHeadDim / kColumns;  // of the head's lanes, those that hold columns
  constexpr int kHeadsPerWarp = kWarp / kLanesEach;
  ReleaseSuccessor();
  WaitForPredecessor();
  const WarpTask task = TaskOfWarp(groups_of_row);
  if (task.row >= a.rows) return;
  const HeadGroup group = groups.Of(task.group);
  const int index = static_cast<int>(threadIdx.x) % kLanesEach;
  Lane lane = {};
  lane.head = static_cast<int>(threadIdx.x) / kLanesEach;
  lane.partner = lane.head * kLanesEach + (index + kLanes / 2) % kLanes;
  const int column = index * kColumns;
  const int first = group.first + lane.head;
  constexpr int kStep = kHeadsPerWarp * kHeadDim;  // columns from a lane's head to its next
  const int64_t width = int64_t{a.heads + 2 * a.kv_heads} * kHeadDim;
  const Bf16* from = a.qkv + task.row * width + group.in_qkv + first * kHeadDim + column;
  const int64_t to = (task.row * group.heads + first) * kHeadDim + column;
  const auto inside = [&](int i) {
    return index < kLanes && first + i * kHeadsPerWarp < group.heads;
  };
  const bool keys = group.kind == HeadKind::kKey;
  const int64_t to_values = int64_t{a.kv_heads} * kHeadDim;  // from a k head to its v head in qkv
  Columns x[kHeads] = {};
  Columns v[kHeads] = {};
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (!inside(i)) continue;
    x[i] = LoadColumns(from + i * kStep);
    if (keys) v[i] = LoadColumns(from + to_values + i * kStep);
  }
  const Bf16* norm = keys ? a.k_norm : a.q_norm;
  Columns weight = {};
  if (index < kLanes) {
    LoadAngles<kHeadDim>(a.cosine, a.sine, a.positions[task.row], index, &lane);
    if (norm != nullptr) weight = LoadColumns(norm + column);
  }
  NormaliseAndRotate<kHeadDim>(x, norm != nullptr, weight, a.eps, lane);
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (keys) MarkUnfit<kHeadDim>(lane.head, &x[i], &v[i]);
    if (!inside(i)) continue;
    StoreColumns((keys ? a.k : a.q) + to + i * kStep, x[i]);
    if (keys) StoreColumns(a.v + to + i * kStep, v[i]);
  }
}

// Any even head_dim and alignment: a warp has one query head, or one k head and its v head.
__global__ void __launch_bounds__(kWarp* kWarpsOfBlock)
    RaggedTrainingQkvKernel(const TrainingQkvArgs a, const HeadGroups groups, int groups_of_row) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const WarpTask task = TaskOfWarp(groups_of_row);
  if (task.row >= a.rows) return;
  const HeadGroup group = groups.Of(task.group);
  const bool keys = group.kind == HeadKind::kKey;
  const int lane = static_cast<int>(threadIdx.x);
  const int32_t d = a.head_dim;
  const int32_t half = d / 2;
  const Bf16* head =
      a.qkv + task.row * (a.heads + 2 * a.kv_heads) * d + group.in_qkv + int64_t{group.first} * d;
  const int64_t to = (task.row * group.heads + group.first) * d;
  bool poisoned = false;
  if (keys) {
    const Bf16* v = head + int64_t{a.kv_heads} * d;
    bool finite = true;
    for (int i = lane; i < d; i += kWarp) finite = finite && contract::IsFinite(v[i]);
    poisoned = __any_sync(0xffffffffu, !finite);
    for (int i = lane; i < d; i += kWarp) a.v[to + i] = poisoned ? Bf16{0} : v[i];
  }
  const Bf16* norm = keys ? a.k_norm : a.q_norm;
  Bf16* out = (keys ? a.k : a.q) + to;
  const float inverse =
      norm == nullptr ? 0.0f : contract::InverseRms(SumOfSquaresOfWarp(head, d), d, a.eps);
  for (int i = lane; i < half; i += kWarp) {
    Bf16 first = head[i];
    Bf16 second = head[i + half];
    if (norm != nullptr) {
      first = contract::Normalise(first, inverse, norm[i]);
      second = contract::Normalise(second, inverse, norm[i + half]);
    }
    const int64_t entry = int64_t{a.positions[task.row]} * half + i;
    const contract::Rotated pair = contract::Rotate(first, second, a.cosine[entry], a.sine[entry]);
    out[i] = poisoned ? contract::kPoisonedKey : pair.first;
    out[i + half] = poisoned ? contract::kPoisonedKey : pair.second;
  }
}

absl::Status LaunchGroups(void (*kernel)(TrainingQkvArgs, HeadGroups, int), int heads_of_group,
                          const TrainingQkvArgs& args, const Stream& stream) {
  const HeadGroups groups(args, heads_of_group);
  const int of_row =
      groups.query_groups + groups.kv_groups;  // a warp has k heads and their v heads
  const int64_t warps = args.rows * of_row;
  const Grid grid = {.blocks = dim3(static_cast<unsigned>(CeilDiv(warps, int64_t{kWarpsOfBlock}))),
                     .threads = dim3(kWarp, kWarpsOfBlock)};
  return Launch(kernel, grid, stream, args, groups, of_row);
}

template <int kHeadDim>
absl::Status LaunchHeads(const TrainingQkvArgs& args, const Stream& stream) {
  return LaunchGroups(TrainingQkvKernel<kHeadDim>, kHeads * kWarp / kLanesOfHead<kHeadDim>, args,
                      stream);
}

}  // namespace

absl::Status Run(const TrainingQkvArgs& args, const Stream& stream) {
  const bool aligned = Aligned16(args.qkv, args.q, args.k, args.v) &&
                       Aligned16(args.q_norm, args.k_norm) && Aligned16(args.cosine, args.sine);
  switch (aligned ? args.head_dim : 0) {
    case 32:
      return LaunchHeads<32>(args, stream);
    case 64:
      return LaunchHeads<64>(args, stream);
    case 80:
      return LaunchHeads<80>(args, stream);
    case 96:
      return LaunchHeads<96>(args, stream);
    case 128:
      return LaunchHeads<128>(args, stream);
    case 192:
      return LaunchHeads<192>(args, stream);
    case 256:
      return LaunchHeads<256>(args, stream);
    default:
      return LaunchGroups(RaggedTrainingQkvKernel, 1, args, stream);
  }
}

}  // namespace isobit::cuda
