// See training.h. Here is what does not depend on the head size.
#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "absl/strings/str_cat.h"
#include "common/base/round_up.h"
#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"
#include "kernels/cuda/common/device/card.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/sm90/attention/gradient.cuh"
#include "kernels/cuda/sm90/attention/gradient.h"
#include "kernels/cuda/sm90/attention/prefill.cuh"
#include "kernels/cuda/sm90/attention/training.h"
#include "kernels/cuda/sm90/device/tensor_map.h"
#include "kernels/ops/attention.h"

namespace isobit::cuda {

namespace {

constexpr int32_t kMaxColumns = 256;
constexpr size_t kAlignment = 256;

absl::Status CheckShape(const TrainingAttentionArgs& a) {
  if (a.head_dim < 8 || a.head_dim % 8 != 0 || a.head_dim > kMaxColumns || a.kv_heads < 1 ||
      a.heads % a.kv_heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("attention of training with head_dim ", a.head_dim, ", ", a.heads, " heads, ",
                     a.kv_heads, " KV heads: head_dim must be a multiple of 8 up to ", kMaxColumns,
                     ", the heads a multiple of the KV heads"));
  }
  const absl::Span<const int32_t> bounds = a.sequences.bounds;
  if (!std::is_sorted(bounds.begin(), bounds.end()) ||
      (!bounds.empty() && (bounds.front() < 0 || bounds.back() > a.rows))) {
    return absl::InvalidArgumentError(absl::StrCat(
        "attention of training: the sequences' bounds must ascend from 0 to ", a.rows));
  }
  return absl::OkStatus();
}

absl::Status CheckAligned(const TrainingAttentionArgs& a, std::initializer_list<const Bf16*> data) {
  for (const Bf16* const x : data) {
    if (!Mappable(x, a.head_dim)) {
      return absl::InvalidArgumentError("a tensor of attention is not aligned to 16 bytes");
    }
  }
  return absl::OkStatus();
}

// The columns of the schedule for a head size.
int32_t Columns(int32_t head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 96 ? 96 : head_dim <= 128 ? 128 : 256;
}

bool IsEmpty(const TrainingAttentionArgs& a) {
  const absl::Span<const int32_t> bounds = a.sequences.bounds;
  return a.heads == 0 || bounds.empty() || bounds.front() == bounds.back();
}

// Sets the rows of no sequence to +0; a row has `width` elements.
absl::Status ClearOutside(const TrainingAttentionArgs& a, int64_t width, Bf16* out,
                          const Stream& stream) {
  const absl::Span<const int32_t> bounds = a.sequences.bounds;
  const int64_t first = bounds.empty() ? a.rows : bounds.front();
  const int64_t end = bounds.empty() ? a.rows : bounds.back();
  const auto clear = [&](int64_t begin, int64_t stop) -> absl::Status {
    if (begin == stop || width == 0) return absl::OkStatus();
    ISOBIT_RETURN_IF_CUDA_ERROR(
        cudaMemsetAsync(out + begin * width, 0,
                        static_cast<size_t>((stop - begin) * width) * sizeof(Bf16), stream.handle));
    return absl::OkStatus();
  };
  ISOBIT_RETURN_IF_ERROR(clear(0, first));
  return clear(end, a.rows);
}

int32_t WindowOf(const TrainingAttentionArgs& a) {
  return a.window >= INT32_MAX / 2 ? 0 : static_cast<int32_t>(a.window);
}

absl::StatusOr<PrefillParams> PrefillParamsOf(const TrainingAttentionArgs& a) {
  PrefillParams p = {};
  p.box_rows = contract::KvTile(a.head_dim);
  ISOBIT_ASSIGN_OR_RETURN(p.k_map, MapHeads(a.k, a.rows, a.kv_heads, a.head_dim, p.box_rows));
  ISOBIT_ASSIGN_OR_RETURN(p.v_map, MapHeads(a.v, a.rows, a.kv_heads, a.head_dim, p.box_rows));
  p.q = a.q;
  p.out = a.out;
  p.ldq = p.ldo = int64_t{a.heads} * a.head_dim;
  p.sequences.first_row = a.sequences.device_bounds;
  p.sequences.num_sequences = static_cast<int32_t>(a.sequences.bounds.size()) - 1;
  p.sequences.num_rows = a.sequences.bounds.back() - a.sequences.bounds.front();
  p.min_rows = 1;
  p.heads_per_kv = a.heads / a.kv_heads;
  p.inverse_heads_per_kv =
      static_cast<uint32_t>(((uint64_t{1} << 32) + p.heads_per_kv - 1) / p.heads_per_kv);
  p.kv_heads = a.kv_heads;
  p.window = WindowOf(a);
  p.scale = a.scale;
  p.q_vectors = p.out_vectors = true;
  p.head_dim = a.head_dim;
  p.rows = a.rows;
  p.log_sums = a.log_sums;
  return p;
}

absl::StatusOr<GradientParams> GradientParamsOf(const AttentionGradientArgs& args) {
  const TrainingAttentionArgs& f = args.forward;
  GradientParams p = {};
  const auto map = [&](const Bf16* data, int32_t heads) {
    return MapHeads(data, f.rows, heads, f.head_dim, kBoxRows);
  };
  ISOBIT_ASSIGN_OR_RETURN(p.q_map, map(f.q, f.heads));
  ISOBIT_ASSIGN_OR_RETURN(p.dout_map, map(args.dout, f.heads));
  ISOBIT_ASSIGN_OR_RETURN(p.k_map, map(f.k, f.kv_heads));
  ISOBIT_ASSIGN_OR_RETURN(p.v_map, map(f.v, f.kv_heads));
  p.bounds = f.sequences.device_bounds;
  p.num_sequences = static_cast<int32_t>(f.sequences.bounds.size()) - 1;
  p.heads_per_kv = f.heads / f.kv_heads;
  p.kv_heads = f.kv_heads;
  p.head_dim = f.head_dim;
  p.window = WindowOf(f);
  p.scale = f.scale;
  p.gradient_scale = contract::GradientScale(f.head_dim);
  p.rows = f.rows;
  p.log_sums = f.log_sums;
  p.dq = args.dq;
  p.dk = args.dk;
  p.dv = args.dv;
  return p;
}

// How ds gets to the kernel of dQ.
struct ScorePlan {
  int32_t kv_heads;  // at a time
  int64_t pairs;     // of tiles, in all sequences
  size_t bytes;      // of ds in memory; 0: it is computed again, for all KV heads at once
};

ScorePlan PlanScores(const TrainingAttentionArgs& f, size_t max_bytes) {
  ScorePlan plan = {.kv_heads = f.kv_heads, .pairs = 0, .bytes = 0};
  if (f.kv_heads < 1 || f.heads < 1) return plan;
  const absl::Span<const int32_t> bounds = f.sequences.bounds;
  for (size_t i = 0; i + 1 < bounds.size(); ++i) {
    plan.pairs += ScoreTilesBefore(CeilDiv(bounds[i + 1] - bounds[i], 64));
  }
  const size_t kv_head_bytes =
      static_cast<size_t>(plan.pairs * (f.heads / f.kv_heads)) * kScoreTileBytes;
  const auto fitting = static_cast<int32_t>(
      std::min<size_t>(max_bytes / std::max<size_t>(kv_head_bytes, 1), f.kv_heads));
  if (fitting == 0) return plan;
  plan.kv_heads = CeilDiv(f.kv_heads, CeilDiv(f.kv_heads, fitting));  // in equal parts
  plan.bytes = kv_head_bytes * static_cast<size_t>(plan.kv_heads);
  return plan;
}

// A block of the kernel of dK and dV takes as long as its keys have queries: up to all the rows of
// its sequence, or a few. With about two blocks for each multiprocessor, the longest first, all end
// together; with one, a launch takes twice its share.
bool FillsTheGpu(const Card& card, const TrainingAttentionArgs& f, int32_t kv_heads) {
  constexpr double kBlocksEach = 1.8;
  const int64_t blocks = CountTiles(f.sequences, KeyTileRows(f.head_dim)) * kv_heads;
  return static_cast<double>(blocks) >= kBlocksEach * card.multiprocessors;
}

// The workspace: a flag (LaunchOutputDots), then D, then ds.
size_t OutputDotBytes(const TrainingAttentionArgs& f) {
  return RoundUp(static_cast<size_t>(f.heads * f.rows) * sizeof(float), kAlignment);
}
size_t LeastBytes(const TrainingAttentionArgs& f) { return kAlignment + OutputDotBytes(f); }

template <int kHeadDim>
absl::Status LaunchGradients(GradientParams params, const PassSequences& sequences,
                             const Stream& stream) {
  const int32_t at_a_time = params.launch_kv_heads;
  for (int32_t first = 0; first < params.kv_heads; first += at_a_time) {
    params.first_kv_head = first;
    params.launch_kv_heads = std::min(at_a_time, params.kv_heads - first);
    ISOBIT_RETURN_IF_ERROR(LaunchKeyGradient<kHeadDim>(params, sequences, stream));
    ISOBIT_RETURN_IF_ERROR(LaunchQueryGradient<kHeadDim>(params, sequences, stream));
  }
  return absl::OkStatus();
}

}  // namespace

// Reads sequences.bounds and sequences.device_bounds. INVALID_ARGUMENT: head_dim is not a multiple
// of 8, or exceeds 256; heads is no multiple of kv_heads; a tensor is not aligned to 16 bytes; or
// the bounds are not within the rows. INTERNAL: CUDA refused a launch.
absl::Status Run(const TrainingAttentionArgs& args, const Stream& stream) {
  ISOBIT_RETURN_IF_ERROR(CheckShape(args));
  ISOBIT_RETURN_IF_ERROR(CheckAligned(args, {args.q, args.k, args.v, args.out}));
  ISOBIT_RETURN_IF_ERROR(ClearOutside(args, int64_t{args.heads} * args.head_dim, args.out, stream));
  if (IsEmpty(args)) return absl::OkStatus();
  ISOBIT_ASSIGN_OR_RETURN(const PrefillParams params, PrefillParamsOf(args));
  switch (Columns(args.head_dim)) {
    case 64:
      return LaunchTrainingPrefill<64>(params, stream);
    case 96:
      return LaunchTrainingPrefill<96>(params, stream);
    case 128:
      return LaunchTrainingPrefill<128>(params, stream);
    default:
      return LaunchTrainingPrefill<256>(params, stream);
  }
}

size_t AttentionGradientWorkspaceBytes(const Card& card, const AttentionGradientArgs& args,
                                       size_t max_score_bytes) {
  const TrainingAttentionArgs& f = args.forward;
  const ScorePlan plan = PlanScores(f, max_score_bytes);
  const bool pays = plan.kv_heads == f.kv_heads || FillsTheGpu(card, f, plan.kv_heads);
  return LeastBytes(f) + (pays ? plan.bytes : 0);
}

absl::Status LaunchAttentionGradient(const AttentionGradientArgs& args,
                                     absl::Span<std::byte> workspace, const Stream& stream) {
  const TrainingAttentionArgs& f = args.forward;
  ISOBIT_RETURN_IF_ERROR(CheckShape(f));
  ISOBIT_RETURN_IF_ERROR(
      CheckAligned(f, {f.q, f.k, f.v, f.out, args.dout, args.dq, args.dk, args.dv}));
  const int64_t width = int64_t{f.heads} * f.head_dim;
  const int64_t kv_width = int64_t{f.kv_heads} * f.head_dim;
  ISOBIT_RETURN_IF_ERROR(ClearOutside(f, width, args.dq, stream));
  ISOBIT_RETURN_IF_ERROR(ClearOutside(f, kv_width, args.dk, stream));
  ISOBIT_RETURN_IF_ERROR(ClearOutside(f, kv_width, args.dv, stream));
  if (IsEmpty(f)) return absl::OkStatus();
  if (workspace.size() < LeastBytes(f)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the gradient of attention needs a workspace of ", LeastBytes(f),
                     " bytes; got ", workspace.size()));
  }
  auto* const unbounded = reinterpret_cast<int32_t*>(workspace.data());
  auto* const output_dots = reinterpret_cast<float*>(workspace.data() + kAlignment);
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(unbounded, 0, sizeof(int32_t), stream.handle));
  ISOBIT_RETURN_IF_ERROR(LaunchOutputDots(
      args, f.sequences.bounds.front(), f.sequences.bounds.back(), output_dots, unbounded, stream));
  ISOBIT_ASSIGN_OR_RETURN(GradientParams params, GradientParamsOf(args));
  params.output_dots = output_dots;
  params.unbounded = unbounded;
  const ScorePlan plan = PlanScores(f, workspace.size() - LeastBytes(f));
  params.launch_kv_heads = plan.kv_heads;
  params.pairs = plan.pairs;
  params.score_gradients = plan.bytes == 0 ? nullptr : workspace.data() + LeastBytes(f);
  switch (Columns(f.head_dim)) {
    case 64:
      return LaunchGradients<64>(params, f.sequences, stream);
    case 96:
      return LaunchGradients<96>(params, f.sequences, stream);
    case 128:
      return LaunchGradients<128>(params, f.sequences, stream);
    default:
      return LaunchGradients<256>(params, f.sequences, stream);
  }
}

absl::Status Run(const AttentionGradientArgs& args, const Stream& stream) {
  ISOBIT_ASSIGN_OR_RETURN(const Card* const card, CardOf(stream));
  const size_t bytes = AttentionGradientWorkspaceBytes(*card, args);
  ISOBIT_ASSIGN_OR_RETURN(std::byte* const workspace, ScratchOf(stream, bytes));
  return LaunchAttentionGradient(args, {workspace, bytes}, stream);
}

}  // namespace isobit::cuda
