// The gradient of what lies between the qkv projection and attention: q and k heads are rotated
// back, and their norm's gradient is computed (C12). A warp has a group of heads and the rows of
// one block of column sums, so the terms of q_norm's and k_norm's gradients add up in registers.
#include <cstdint>

#include "common/base/round_up.h"
#include "common/base/status_macros.h"
#include "kernels/contract/gradients.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cuda/common/device/alignment.h"
#include "kernels/cuda/common/device/async_copy.cuh"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/device/row_columns.cuh"
#include "kernels/cuda/common/device/shared_address.cuh"
#include "kernels/cuda/common/rows/block_sums.h"
#include "kernels/cuda/common/rows/heads.cuh"
#include "kernels/cuda/common/rows/leaf_tree.cuh"
#include "kernels/cuda/common/rows/norm_gradient.cuh"
#include "kernels/cuda/common/rows/training_heads.cuh"
#include "kernels/ops/qkv.h"

namespace isobit::cuda {
namespace {

constexpr int kWarpsOfBlock = 4;
constexpr int kBlocksPerSm = 3;
constexpr int kHeads = 4;  // of a lane

struct QkvGradientParams {
  TrainingQkvArgs forward;
  const Bf16* dq;
  const Bf16* dk;
  const Bf16* dv;
  Bf16* dqkv;
  PackBlocks blocks;
  BlockSums sums;  // columns: those of the q heads, then of the k heads
  HeadGroups groups;
  int groups_of_row;

  __device__ __forceinline__ int64_t Width() const {
    return int64_t{forward.heads + 2 * forward.kv_heads} * forward.head_dim;
  }
};

struct WarpTask {
  int block;  // of rows
  int group;
};
__device__ __forceinline__ WarpTask TaskOfWarp(int groups) {
  const auto warp = static_cast<int>(blockIdx.x * kWarpsOfBlock + threadIdx.y);
  return {warp / groups, warp % groups};
}

// The rows that a lane reads next lie in a ring of shared memory, where no other lane touches them.
// HeadColumns: a lane's columns of a row, of the forward pass's heads and of their rotated
// gradients.
constexpr int kStages = 3;
struct HeadColumns {
  Columns x[kHeads][kWarp];
  Columns d[kHeads][kWarp];
};
// The terms of a head's norm, too, add up there: in registers they would keep warps off the GPU.
struct Scratch {
  HeadColumns rows[kWarpsOfBlock][kStages];
  float4 dw[kWarpsOfBlock][kHeads][2][kWarp];
};
extern __shared__ __align__(16) std::byte shared_memory[];

// This lane's sums of one head.
__device__ __forceinline__ void LoadSums(const float4 (&from)[2][kWarp], float (&v)[kColumns]) {
  const float4 a = from[0][threadIdx.x];
  const float4 b = from[1][threadIdx.x];
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
  v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
__device__ __forceinline__ void StoreSums(const float (&v)[kColumns], float4 (&to)[2][kWarp]) {
  to[0][threadIdx.x] = {v[0], v[1], v[2], v[3]};
  to[1][threadIdx.x] = {v[4], v[5], v[6], v[7]};
}

template <int kHeadDim>
__global__ void __launch_bounds__(kWarp* kWarpsOfBlock, kBlocksPerSm)
    QkvGradientKernel(const __grid_constant__ QkvGradientParams p) {
  constexpr int kLanesEach = kLanesOfHead<kHeadDim>;
  constexpr int kLanes = kHeadDim / kColumns;  // of the head's lanes, those that hold columns
  constexpr int kHeadsPerWarp = kWarp / kLanesEach;
  ReleaseSuccessor();
  WaitForPredecessor();
  const WarpTask task = TaskOfWarp(p.groups_of_row);
  if (task.block >= p.blocks.count()) return;
  const TrainingQkvArgs& f = p.forward;
  const RowBlock rows = RowsOfBlock(p.blocks, task.block);
  const HeadGroup group = p.groups.Of(task.group);
  const int index = static_cast<int>(threadIdx.x) % kLanesEach;
  Lane lane = {};
  lane.head = static_cast<int>(threadIdx.x) / kLanesEach;
  lane.partner = lane.head * kLanesEach + (index + kLanes / 2) % kLanes;
  const int column = (group.first + lane.head) * kHeadDim + index * kColumns;
  const bool has_columns = index < kLanes;
  const auto inside = [&](int i) {
    return has_columns && group.first + lane.head + i * kHeadsPerWarp < group.heads;
  };
  constexpr int kStep = kHeadsPerWarp * kHeadDim;  // columns from a lane's head to its next
  const auto width = static_cast<int>(p.Width());
  const int64_t offset = rows.first * width + group.in_qkv + column;
  const Bf16* const gradients =
      OfKind(group.kind, p.dq, p.dk, p.dv) + rows.first * group.heads * kHeadDim + column;
  Bf16* const out = p.dqkv + offset;
  const bool value = group.kind == HeadKind::kValue;
  const Bf16* norm = value ? nullptr : OfKind(group.kind, f.q_norm, f.k_norm, f.k_norm);
  const bool has_norm = norm != nullptr;

  auto& scratch = *reinterpret_cast<Scratch*>(shared_memory);
  HeadColumns(&ring)[kStages] = scratch.rows[threadIdx.y];
  float4(&dw)[kHeads][2][kWarp] = scratch.dw[threadIdx.y];
  const auto fetch = [&](int row) {
    HeadColumns& to = ring[row % kStages];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      if (row >= rows.rows) continue;
      const Bf16* d = gradients + row * group.heads * kHeadDim + i * kStep;
      CopyUnitOrZero(SharedAddress(&to.d[i][threadIdx.x]), d, inside(i));
      if (!has_norm) continue;
      const Bf16* x = f.qkv + offset + row * width + i * kStep;
      CopyUnitOrZero(SharedAddress(&to.x[i][threadIdx.x]), x, inside(i));
    }
    CommitUnits();
  };
#pragma unroll
  for (int i = 0; i < kHeads; ++i) dw[i][0][threadIdx.x] = dw[i][1][threadIdx.x] = {};
#pragma unroll
  for (int row = 0; row < kStages - 1; ++row) fetch(row);
  const int32_t* const positions = f.positions + rows.first;
  int32_t position = positions[0];
#pragma unroll 1
  for (int row = 0; row < rows.rows; ++row) {
    fetch(row + kStages - 1);
    if (!value && has_columns) {
      LoadAngles<kHeadDim>(f.cosine, f.sine, position, index, &lane);
#pragma unroll
      for (float& sine : lane.sine) sine = -sine;  // back
    }
    if (row + 1 < rows.rows) position = positions[row + 1];
    WaitForCommitGroups<kStages - 1>();
    const HeadColumns& from = ring[row % kStages];
    Columns d[kHeads];
#pragma unroll
    for (int i = 0; i < kHeads; ++i) d[i] = from.d[i][threadIdx.x];
    if (!value) RotateHeads(d, lane);
    if (has_norm) {
      Columns x[kHeads];
      float inverse[kHeads];
      float mean[kHeads];
#pragma unroll
      for (int i = 0; i < kHeads; ++i) x[i] = from.x[i][threadIdx.x];
      InverseRmsOfHeads<kHeadDim>(x, lane.head, f.eps, inverse);
      Columns weight = {};  // loaded anew for each row: registers are short
      if (has_columns) weight = LoadColumns(norm + index * kColumns);
#pragma unroll
      for (int i = 0; i < kHeads; ++i) {
        ForgetProducts(&x[i]);
        const float dot = has_columns ? DotOfColumns(x[i], d[i], weight, inverse[i]) : 0.0f;
        mean[i] = TreeOfLanes<kLanesEach>(dot);
      }
      OnceForEachHead<kHeadDim>(mean, lane.head, [](float dot) {
        return contract::Div(dot, static_cast<float>(kHeadDim));
      });
#pragma unroll
      for (int i = 0; i < kHeads; ++i) {
        ForgetProducts(&x[i]);
        ForgetProducts(&d[i]);
        float sums[kColumns];
        LoadSums(dw[i], sums);
        AddWeightTerms(x[i], d[i], inverse[i], sums);
        StoreSums(sums, dw[i]);
        d[i] = NormGradientOfColumns(x[i], d[i], weight, inverse[i], mean[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      if (inside(i)) StoreColumns(out + row * width + i * kStep, d[i]);
    }
  }
  WaitForUnits();
  if (!has_norm) return;
  float* const to = p.sums.of_blocks + task.block * p.sums.columns + group.in_qkv + column;
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (!inside(i)) continue;
    float sums[kColumns];
    LoadSums(dw[i], sums);
    StoreFloats(to + i * kStep, sums);
  }
}

// The norm's gradient of one head x[0..n), by one warp: dy becomes dx, and the terms of dw are
// added.
__device__ __noinline__ void RaggedNormGradient(const Bf16* x, const Bf16* weight, int n, float eps,
                                                Bf16* dy, float* dw) {
  const int lane = static_cast<int>(threadIdx.x);
  const float inverse = contract::InverseRms(SumOfSquaresOfWarp(x, n), n, eps);
  const auto h = [&](int c) { return contract::Mul(contract::Bf16ToFloat(x[c]), inverse); };
  const auto g = [&](int c) {
    return contract::Mul(contract::Bf16ToFloat(dy[c]), contract::Bf16ToFloat(weight[c]));
  };
  const auto leaves =
      static_cast<int>(PaddedLeaves((n + contract::kNormLeaf - 1) / contract::kNormLeaf));
  __syncwarp();  // other lanes have written some of dy
  contract::TreeSum tree;
  for (int begin = 0; begin < n; begin += kWarp * contract::kNormLeaf) {
    const int first = begin + lane * contract::kNormLeaf;
    float hs[contract::kNormLeaf] = {};
    float gs[contract::kNormLeaf] = {};
#pragma unroll
    for (int i = 0; i < contract::kNormLeaf; ++i) {
      if (first + i >= n) continue;
      hs[i] = h(first + i);
      gs[i] = g(first + i);
    }
    const float leaf = first < n ? contract::DotLeaf(gs, hs) : 0.0f;
    tree.Push(OfLane0(TreeOfLeaves(leaf, 1, leaves)));
  }
  const float mean = contract::Div(tree.Total(), static_cast<float>(n));
  for (int c = lane; c < n; c += kWarp) {
    dw[c] = contract::Add(dw[c], contract::NormWeightTerm(dy[c], x[c], inverse));
    dy[c] = contract::NormGradient(h(c), g(c), mean, inverse);
  }
}

// Any even head_dim and alignment: a warp has one head.
__global__ void __launch_bounds__(kWarp* kWarpsOfBlock)
    RaggedQkvGradientKernel(const __grid_constant__ QkvGradientParams p) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const WarpTask task = TaskOfWarp(p.groups_of_row);
  if (task.block >= p.blocks.count()) return;
  const TrainingQkvArgs& f = p.forward;
  const RowBlock rows = RowsOfBlock(p.blocks, task.block);
  const HeadGroup group = p.groups.Of(task.group);
  const int lane = static_cast<int>(threadIdx.x);
  const int32_t d = f.head_dim;
  const int32_t half = d / 2;
  const bool value = group.kind == HeadKind::kValue;
  const Bf16* norm = value ? nullptr : OfKind(group.kind, f.q_norm, f.k_norm, f.k_norm);
  const int64_t column = group.in_qkv + int64_t{group.first} * d;
  float* dw = p.sums.of_blocks + task.block * p.sums.columns + column;
  if (norm != nullptr) {
    for (int c = lane; c < d; c += kWarp) dw[c] = 0.0f;
  }
  for (int64_t row = rows.first; row < rows.first + rows.rows; ++row) {
    const Bf16* gradient =
        OfKind(group.kind, p.dq, p.dk, p.dv) + (row * group.heads + group.first) * d;
    Bf16* out = p.dqkv + row * p.Width() + column;
    for (int i = lane; i < d; i += kWarp) {
      if (value) out[i] = gradient[i];
      if (value || i >= half) continue;
      const int64_t entry = int64_t{f.positions[row]} * half + i;
      const contract::RotatedGradient pair =
          contract::RotateGradient(gradient[i], gradient[i + half], f.cosine[entry], f.sine[entry]);
      out[i] = pair.first;
      out[i + half] = pair.second;
    }
    if (norm != nullptr)
      RaggedNormGradient(f.qkv + row * p.Width() + column, norm, d, f.eps, out, dw);
  }
}

absl::Status LaunchGroups(void (*kernel)(QkvGradientParams), int heads_of_group,
                          size_t shared_bytes, const QkvGradientArgs& args,
                          const PackBlocks& blocks, const BlockSums& sums, const Stream& stream) {
  const HeadGroups groups(args.forward, heads_of_group);
  const QkvGradientParams params = {.forward = args.forward,
                                    .dq = args.dq,
                                    .dk = args.dk,
                                    .dv = args.dv,
                                    .dqkv = args.dqkv,
                                    .blocks = blocks,
                                    .sums = sums,
                                    .groups = groups,
                                    .groups_of_row = groups.count()};
  const int warps = blocks.count() * groups.count();
  const Grid grid = {.blocks = dim3(static_cast<unsigned>(CeilDiv(warps, kWarpsOfBlock))),
                     .threads = dim3(kWarp, kWarpsOfBlock),
                     .shared_bytes = shared_bytes};
  return Launch(kernel, grid, stream, params);
}

template <int kHeadDim>
absl::Status LaunchHeads(const QkvGradientArgs& args, const PackBlocks& blocks,
                         const BlockSums& sums, const Stream& stream) {
  return LaunchGroups(QkvGradientKernel<kHeadDim>, kHeads * kWarp / kLanesOfHead<kHeadDim>,
                      sizeof(Scratch), args, blocks, sums, stream);
}

absl::Status LaunchMain(const QkvGradientArgs& args, const PackBlocks& blocks,
                        const BlockSums& sums, const Stream& stream) {
  const TrainingQkvArgs& f = args.forward;
  const bool aligned = Aligned16(f.qkv, f.q_norm, f.k_norm) && Aligned16(f.cosine, f.sine) &&
                       Aligned16(args.dq, args.dk, args.dv, args.dqkv) && Aligned16(sums.of_blocks);
  switch (aligned ? f.head_dim : 0) {
    case 32:
      return LaunchHeads<32>(args, blocks, sums, stream);
    case 64:
      return LaunchHeads<64>(args, blocks, sums, stream);
    case 80:
      return LaunchHeads<80>(args, blocks, sums, stream);
    case 96:
      return LaunchHeads<96>(args, blocks, sums, stream);
    case 128:
      return LaunchHeads<128>(args, blocks, sums, stream);
    case 192:
      return LaunchHeads<192>(args, blocks, sums, stream);
    case 256:
      return LaunchHeads<256>(args, blocks, sums, stream);
    default:
      return LaunchGroups(RaggedQkvGradientKernel, 1, 0, args, blocks, sums, stream);
  }
}

bool HasNorms(const TrainingQkvArgs& forward) {
  return forward.q_norm != nullptr || forward.k_norm != nullptr;
}
int64_t NormColumns(const TrainingQkvArgs& f) {
  return HasNorms(f) ? int64_t{f.heads + f.kv_heads} * f.head_dim : 0;
}

}  // namespace

absl::Status Run(const QkvGradientArgs& args, const Stream& stream) {
  ISOBIT_ASSIGN_OR_RETURN(const PackBlocks blocks, CutIntoBlocks(args.packs));
  ISOBIT_ASSIGN_OR_RETURN(std::byte* const workspace,
                          ScratchOf(stream, BlockSumsBytes(args.packs, NormColumns(args.forward))));
  const TrainingQkvArgs& f = args.forward;
  const BlockSums sums(workspace, blocks, NormColumns(f));
  ISOBIT_RETURN_IF_ERROR(LaunchMain(args, blocks, sums, stream));
  if (!HasNorms(f)) return absl::OkStatus();
  const int64_t keys = int64_t{f.heads} * f.head_dim;
  return LaunchSumBlocks(
      sums, blocks, {.out = args.dq_norm, .first = 0, .width = f.head_dim, .heads = f.heads},
      {.out = args.dk_norm, .first = keys, .width = f.head_dim, .heads = f.kv_heads}, stream);
}

}  // namespace isobit::cuda
