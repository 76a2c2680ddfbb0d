// The forward pass: embedding, layers, final norm, logits. See transformer.h.
#include "kernels/model/transformer.h"

#include <optional>
#include <utility>

#include "common/base/status_macros.h"
#include "kernels/contract/attention.h"
#include "kernels/ops/attention.h"
#include "kernels/ops/embedding.h"
#include "kernels/ops/linear.h"
#include "kernels/ops/paged_kv.h"
#include "kernels/ops/qkv.h"

namespace isobit {
namespace {

// Columns of a layer's activations on this rank; all layers are alike.
struct LayerWidths {
  int64_t qkv;
  int64_t attended;
  int64_t activated;
};

LayerWidths WidthsOf(const WeightLayout& layout) {
  const BlockWeights layer = layout.Bind(1, nullptr);
  return {layer.linear(Role::kQkv).shape.n, layer.linear(Role::kO).shape.k,
          layer.linear(Role::kDown).shape.k};
}

}  // namespace

Transformer::Transformer(const WeightLayout& layout, const contract::RopeTable& rope, Backend& ops,
                         AllReduce* all_reduce)
    : layout_(layout),
      rope_(rope),
      ops_(ops),
      residual_(layout.config().hidden_size, layout.config().rms_norm_eps, ops, all_reduce) {}

void Transformer::ShareMemory(const Transformer& other) {
  residual_.ShareMemory(other.residual_);
  activations_ = other.activations_;
  cosine_ = other.cosine_;
  sine_ = other.sine_;
}

absl::Status Transformer::Reserve(int64_t rows) {
  const LayerWidths widths = WidthsOf(layout_);
  Device& device = ops_.device();
  ISOBIT_RETURN_IF_ERROR(residual_.Reserve(rows));
  ISOBIT_RETURN_IF_ERROR(activations_->qkv.Reserve(device, rows * widths.qkv));
  ISOBIT_RETURN_IF_ERROR(activations_->attended.Reserve(device, rows * widths.attended));
  ISOBIT_RETURN_IF_ERROR(activations_->activated.Reserve(device, rows * widths.activated));
  return cosine_ == nullptr ? ShareRope() : absl::OkStatus();
}

absl::Status Transformer::PrepareProbe(int64_t rows) {
  return gate_up_.Reserve(ops_.device(), rows * 2 * WidthsOf(layout_).activated);
}

size_t Transformer::ReservedBytes(const WeightLayout& layout, int64_t rows) {
  const LayerWidths widths = WidthsOf(layout);
  return ResidualStream::ReservedBytes(layout.config().hidden_size, rows) +
         static_cast<size_t>(rows * (widths.qkv + widths.attended + widths.activated)) *
             sizeof(Bf16);
}

absl::Status Transformer::ShareRope() {
  const auto share = [this](const std::vector<float>& table) {
    const auto* bytes = reinterpret_cast<const std::byte*>(table.data());
    return ops_.device().Share({std::shared_ptr<const void>(), bytes},
                               table.size() * sizeof(float));
  };
  ISOBIT_ASSIGN_OR_RETURN(cosine_, share(rope_.cosine));
  ISOBIT_ASSIGN_OR_RETURN(sine_, share(rope_.sine));
  return absl::OkStatus();
}

absl::Status Transformer::Forward(const Batch& batch, WeightSource& weights, const KvCache& cache,
                                  Bf16* hidden) {
  ISOBIT_ASSIGN_OR_RETURN(
      const UploadedStep step,
      ops_.tables().Upload(batch.ids, batch.sequences, cache.page_size(), batch.writes_past));
  return Forward(step, static_cast<int64_t>(batch.ids.size()), weights, cache, hidden);
}

absl::Status Transformer::Forward(const UploadedStep& step, int64_t rows, WeightSource& weights,
                                  const KvCache& cache, Bf16* hidden) {
  ISOBIT_RETURN_IF_ERROR(Reserve(rows));
  // A pass in halves would not leave the residual whole on each rank, for the probe to see.
  ISOBIT_RETURN_IF_ERROR(
      residual_.Begin(step, rows, cache.page_size(), /*may_cut=*/probe_ == nullptr));
  ISOBIT_ASSIGN_OR_RETURN(HeldBlock block, HeldBlock::Acquire(weights, 0));
  ISOBIT_RETURN_IF_ERROR(
      ops_.Run(EmbeddingArgs{.ids = step.ids,
                             .rows = rows,
                             .table = layout_.Bind(0, block.bytes()).bf16(Role::kEmbedding),
                             .hidden = layout_.config().hidden_size,
                             .out = residual_.data()}));
  if (probe_ != nullptr) {
    ISOBIT_RETURN_IF_ERROR(probe_->SeeWhole(0, ProbeOp::kEmbedding, residual_.data(), rows,
                                            layout_.config().hidden_size));
  }
  // In halves a layer uses the norm weight of the next block, too, so that block is acquired early.
  std::optional<HeldBlock> next;
  const auto advance = [&](int to) -> absl::Status {
    block.Release();
    if (!next) {
      ISOBIT_ASSIGN_OR_RETURN(next, HeldBlock::Acquire(weights, to));
    }
    block = *std::exchange(next, std::nullopt);
    return absl::OkStatus();
  };
  for (int layer = 0; layer < layout_.config().num_layers; ++layer) {
    ISOBIT_RETURN_IF_ERROR(advance(layer + 1));
    const Bf16* next_norm = nullptr;
    if (residual_.num_halves() > 1) {
      const int next_block = layer + 2;
      ISOBIT_ASSIGN_OR_RETURN(next, HeldBlock::Acquire(weights, next_block));
      next_norm =
          layout_.Bind(next_block, next->bytes())
              .bf16(next_block == layout_.head_block() ? Role::kFinalNorm : Role::kInputNorm);
    }
    ISOBIT_RETURN_IF_ERROR(Layer(layer, layout_.Bind(layer + 1, block.bytes()), next_norm, cache));
  }
  ISOBIT_RETURN_IF_ERROR(advance(layout_.head_block()));
  const Bf16* const norm = layout_.Bind(layout_.head_block(), block.bytes()).bf16(Role::kFinalNorm);
  const int64_t width = layout_.config().hidden_size;
  for (size_t h = 0; h < residual_.num_halves(); ++h) {
    const StepRows& half = residual_.half(h);
    Bf16* const out = hidden + half.first_row * width;
    ISOBIT_ASSIGN_OR_RETURN(const Bf16* x, residual_.Norm(h, norm, out));
    const int layers = layout_.config().num_layers;
    ISOBIT_RETURN_IF_ERROR(
        SeeNorm({layers - 1, ProbeOp::kMlpSum}, {layers, ProbeOp::kFinalNorm}, x));
    if (x == out) continue;
    const auto bytes = static_cast<size_t>(half.rows * width) * sizeof(Bf16);
    ISOBIT_RETURN_IF_ERROR(ops_.device().Copy(out, x, bytes));
  }
  return absl::OkStatus();
}

absl::Status Transformer::Layer(int layer, const BlockWeights& w, const Bf16* next_norm,
                                const KvCache& cache) {
  const Bf16* const input_norm = w.bf16(Role::kInputNorm);
  const Bf16* const post_norm = w.bf16(Role::kPostNorm);
  const PagedKv kv = cache.layer(layer);
  for (size_t h = 0; h < residual_.num_halves(); ++h) {
    const StepRows& half = residual_.half(h);
    ISOBIT_ASSIGN_OR_RETURN(const Bf16* normed, residual_.Norm(h, input_norm));
    ISOBIT_RETURN_IF_ERROR(
        SeeNorm({layer - 1, ProbeOp::kMlpSum}, {layer, ProbeOp::kInputNorm}, normed));
    ISOBIT_RETURN_IF_ERROR(Qkv(half, layer, w, normed, kv));
    ISOBIT_ASSIGN_OR_RETURN(const Bf16* attended, Attend(half, layer, w, kv));
    ISOBIT_RETURN_IF_ERROR(residual_.SumHalfBefore(h, h == 0 ? input_norm : post_norm));
    ISOBIT_RETURN_IF_ERROR(residual_.Add(h, attended, w.linear(Role::kO), w.fp32(Role::kOBias)));
  }
  for (size_t h = 0; h < residual_.num_halves(); ++h) {
    ISOBIT_ASSIGN_OR_RETURN(const Bf16* normed, residual_.Norm(h, post_norm));
    ISOBIT_RETURN_IF_ERROR(
        SeeNorm({layer, ProbeOp::kAttentionSum}, {layer, ProbeOp::kPostNorm}, normed));
    ISOBIT_ASSIGN_OR_RETURN(const Bf16* activated, Activate(residual_.half(h), layer, w, normed));
    ISOBIT_RETURN_IF_ERROR(residual_.SumHalfBefore(h, h == 0 ? post_norm : next_norm));
    ISOBIT_RETURN_IF_ERROR(
        residual_.Add(h, activated, w.linear(Role::kDown), w.fp32(Role::kDownBias)));
  }
  return absl::OkStatus();
}

absl::Status Transformer::SeeNorm(const ProbeSite& sum, const ProbeSite& norm, const Bf16* normed) {
  if (probe_ == nullptr) return absl::OkStatus();
  const int64_t rows = residual_.half(0).rows;
  const int64_t width = layout_.config().hidden_size;
  // Before the first layer nothing has been added to the embedding.
  if (sum.layer >= 0) {
    ISOBIT_RETURN_IF_ERROR(probe_->SeeWhole(sum.layer, sum.op, residual_.data(), rows, width));
  }
  return probe_->SeeWhole(norm.layer, norm.op, normed, rows, width);
}

absl::Status Transformer::Qkv(const StepRows& half, int layer, const BlockWeights& w,
                              const Bf16* normed, const PagedKv& kv) {
  const ModelConfig& config = layout_.config();
  const LinearWeight weight = w.linear(Role::kQkv);
  const int64_t columns = weight.shape.n;
  Bf16* const qkv = activations_->qkv.data() + half.first_row * columns;
  ISOBIT_RETURN_IF_ERROR(ops_.Run(LinearArgs{.x = normed,
                                             .ldx = config.hidden_size,
                                             .m = half.rows,
                                             .weight = weight,
                                             .bias = w.fp32(Role::kQkvBias),
                                             .bf16_out = qkv,
                                             .ldy = columns}));
  if (probe_ != nullptr) {
    ISOBIT_RETURN_IF_ERROR(probe_->SeeQkv(layer, qkv, half.rows, columns));
  }
  ISOBIT_RETURN_IF_ERROR(ops_.Run(QkvArgs{.qkv = qkv,
                                          .ld = columns,
                                          .heads = static_cast<int32_t>(layout_.shape().heads),
                                          .q_norm = w.bf16(Role::kQNorm),
                                          .k_norm = w.bf16(Role::kKNorm),
                                          .eps = config.rms_norm_eps,
                                          .cosine = reinterpret_cast<const float*>(cosine_.get()),
                                          .sine = reinterpret_cast<const float*>(sine_.get()),
                                          .sequences = half.sequences,
                                          .kv = kv}));
  if (probe_ != nullptr) {
    ISOBIT_RETURN_IF_ERROR(probe_->SeeQueries(layer, qkv, half.rows, columns));
    ISOBIT_RETURN_IF_ERROR(probe_->SeeCache(layer, kv, half.sequences.host.front()));
  }
  return absl::OkStatus();
}

absl::StatusOr<const Bf16*> Transformer::Attend(const StepRows& half, int layer,
                                                const BlockWeights& w, const PagedKv& kv) {
  const ModelConfig& config = layout_.config();
  const int64_t qkv_columns = w.linear(Role::kQkv).shape.n;
  const int64_t columns = w.linear(Role::kO).shape.k;
  Bf16* const attended = activations_->attended.data() + half.first_row * columns;
  ISOBIT_RETURN_IF_ERROR(
      ops_.Run(AttentionArgs{.q = activations_->qkv.data() + half.first_row * qkv_columns,
                             .ldq = qkv_columns,
                             .heads = static_cast<int32_t>(layout_.shape().heads),
                             .sequences = half.sequences,
                             .kv = kv,
                             .scale = contract::AttentionScale(config.head_dim),
                             .window = config.WindowOfLayer(layer),
                             .out = attended,
                             .ldo = columns}));
  if (probe_ != nullptr) {
    ISOBIT_RETURN_IF_ERROR(probe_->SeeAttention(layer, attended, half.rows, columns));
  }
  return attended;
}

absl::StatusOr<const Bf16*> Transformer::Activate(const StepRows& half, int layer,
                                                  const BlockWeights& w, const Bf16* normed) {
  const int64_t columns = w.linear(Role::kDown).shape.k;
  Bf16* const activated = activations_->activated.data() + half.first_row * columns;
  LinearArgs args = {.x = normed,
                     .ldx = layout_.config().hidden_size,
                     .m = half.rows,
                     .weight = w.linear(Role::kGateUp),
                     .bias = w.fp32(Role::kGateUpBias),
                     .swiglu_out = activated,
                     .ldy = columns};
  ISOBIT_RETURN_IF_ERROR(ops_.Run(args));
  if (probe_ != nullptr) {
    args.swiglu_out = nullptr;
    args.bf16_out = gate_up_.data();
    args.ldy = 2 * columns;
    ISOBIT_RETURN_IF_ERROR(ops_.Run(args));
    const int64_t first = layout_.FirstActivation();
    ISOBIT_RETURN_IF_ERROR(probe_->SeeGateUp(layer, gate_up_.data(), half.rows, columns, first));
    ISOBIT_RETURN_IF_ERROR(probe_->SeeActivation(layer, activated, half.rows, columns, first));
  }
  return activated;
}

absl::Status Transformer::Logits(const Bf16* hidden, int64_t rows, WeightSource& weights,
                                 float* logits, int64_t ld) {
  ISOBIT_ASSIGN_OR_RETURN(const HeldBlock block, HeldBlock::Acquire(weights, layout_.head_block()));
  return ops_.Run(
      LinearArgs{.x = hidden,
                 .ldx = layout_.config().hidden_size,
                 .m = rows,
                 .weight = layout_.Bind(layout_.head_block(), block.bytes()).linear(Role::kHead),
                 .fp32_out = logits,
                 .ldy = ld});
}

}  // namespace isobit
