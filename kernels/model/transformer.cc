// The forward pass: embedding, layers, final norm, logits. See transformer.h.
#include "kernels/model/transformer.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "common/base/status_macros.h"
#include "kernels/contract/attention.h"

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

absl::StatusOr<KvCache> KvCache::Create(const ModelConfig& config, const RankShape& shape,
                                        int32_t num_pages, int32_t page_size, bool shared_layers,
                                        Device& device) {
  KvCache cache;
  cache.num_pages_ = num_pages;
  cache.shared_layers_ = shared_layers;
  cache.geometry_.page_size = page_size;
  cache.geometry_.kv_heads = static_cast<int32_t>(shape.kv_heads.size());
  cache.geometry_.head_dim = config.head_dim;
  const auto layers = static_cast<size_t>(config.num_layers);
  const size_t layer_bytes =
      PageBytes(config, shape, page_size) / layers * static_cast<size_t>(num_pages);
  cache.layer_elements_ = layer_bytes / (2 * sizeof(Bf16));
  cache.bytes_ = shared_layers ? layer_bytes : layers * layer_bytes;
  ISOBIT_ASSIGN_OR_RETURN(cache.memory_, device.Allocate(cache.bytes_));
  return cache;
}

size_t KvCache::PageBytes(const ModelConfig& config, const RankShape& shape, int32_t page_size) {
  return 2 * sizeof(Bf16) * static_cast<size_t>(page_size) *
         static_cast<size_t>(shape.kv_heads.size()) * static_cast<size_t>(config.head_dim) *
         static_cast<size_t>(config.num_layers);
}

PagedKv KvCache::layer(int layer) const {
  PagedKv kv = geometry_;
  const size_t index = shared_layers_ ? 0 : static_cast<size_t>(layer);
  kv.k = reinterpret_cast<Bf16*>(memory_.get()) + 2 * index * layer_elements_;
  kv.v = kv.k + layer_elements_;
  return kv;
}

template <typename T>
absl::StatusOr<T*> Transformer::Buffer<T>::Reserve(Device& device, int64_t elements) {
  const size_t bytes = static_cast<size_t>(elements) * sizeof(T);
  if (memory_ == nullptr || bytes_ < bytes) {
    memory_ = nullptr;  // before its successor is allocated
    ISOBIT_ASSIGN_OR_RETURN(memory_, device.Allocate(bytes));
    bytes_ = bytes;
  }
  return data();
}

Transformer::Transformer(const WeightLayout& layout, const contract::RopeTable& rope,
                         NumericsMode mode, Ops& ops, AllReduce* all_reduce)
    : layout_(layout), rope_(rope), mode_(mode), ops_(ops), all_reduce_(all_reduce) {}

absl::Status Transformer::Reserve(int64_t rows) {
  const LayerWidths widths = WidthsOf(layout_);
  const int64_t width = layout_.config().hidden_size;
  const int64_t partial_bytes =
      rows * width * static_cast<int64_t>(has_bf16_partials() ? sizeof(Bf16) : sizeof(float));
  ISOBIT_RETURN_IF_ERROR(residual_.Reserve(ops_.device(), rows * width).status());
  ISOBIT_RETURN_IF_ERROR(normed_.Reserve(ops_.device(), rows * width).status());
  ISOBIT_RETURN_IF_ERROR(qkv_.Reserve(ops_.device(), rows * widths.qkv).status());
  ISOBIT_RETURN_IF_ERROR(attended_.Reserve(ops_.device(), rows * widths.attended).status());
  ISOBIT_RETURN_IF_ERROR(activated_.Reserve(ops_.device(), rows * widths.activated).status());
  ISOBIT_RETURN_IF_ERROR(partial_[0].Reserve(ops_.device(), partial_bytes).status());
  ISOBIT_RETURN_IF_ERROR(partial_[1].Reserve(ops_.device(), partial_bytes).status());
  ISOBIT_RETURN_IF_ERROR(bias_.Reserve(ops_.device(), 2 * width).status());
  return cosine_ == nullptr ? ShareRope() : absl::OkStatus();
}

size_t Transformer::ReservedBytes(const WeightLayout& layout, int64_t rows) {
  const LayerWidths widths = WidthsOf(layout);
  const int64_t width = layout.config().hidden_size;
  const int64_t bf16 = 2 * width + widths.qkv + widths.attended + widths.activated;
  return static_cast<size_t>(rows) * (static_cast<size_t>(bf16) * sizeof(Bf16) +
                                      2 * static_cast<size_t>(width) * sizeof(float));
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
  ISOBIT_ASSIGN_OR_RETURN(const StagedStep step,
                          ops_.tables().Stage(batch.ids, batch.sequences, cache.page_size()));
  return Forward(step, static_cast<int64_t>(batch.ids.size()), weights, cache, hidden);
}

absl::Status Transformer::Forward(const StagedStep& step, int64_t rows, WeightSource& weights,
                                  const KvCache& cache, Bf16* hidden) {
  ISOBIT_RETURN_IF_ERROR(Reserve(rows));
  ISOBIT_RETURN_IF_ERROR(CutIntoParts(step, rows, cache.page_size()));
  ISOBIT_ASSIGN_OR_RETURN(HeldBlock block, HeldBlock::Acquire(weights, 0));
  ISOBIT_RETURN_IF_ERROR(
      ops_.Embedding({.ids = step.ids,
                      .rows = rows,
                      .table = layout_.Bind(0, block.bytes()).bf16(Role::kEmbedding),
                      .hidden = layout_.config().hidden_size,
                      .out = residual_.data()}));
  // In halves a layer ends with the norm of the block after it.
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
    if (overlapped_ != nullptr) {
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
  for (size_t p = 0; p < parts_.size(); ++p) {
    Bf16* const out = hidden + parts_[p].first_row * width;
    ISOBIT_ASSIGN_OR_RETURN(const Bf16* x, Normalise(p, norm, out));
    if (x == out) continue;
    const auto bytes = static_cast<size_t>(parts_[p].rows * width) * sizeof(Bf16);
    ISOBIT_RETURN_IF_ERROR(ops_.device().Copy(out, x, bytes));
  }
  return absl::OkStatus();
}

absl::Status Transformer::CutIntoParts(const StagedStep& step, int64_t rows, int32_t page_size) {
  parts_ = {{.rows = rows, .sequences = step.sequences}};
  overlapped_ = nullptr;
  const absl::Span<const SequenceRows> sequences = step.sequences.host;
  // Rows of padding have no sequence that could be cut.
  const bool whole =
      !sequences.empty() && sequences.back().first_row + sequences.back().num_rows == rows;
  if (!whole || rows < 2 || all_reduce_ == nullptr) return absl::OkStatus();
  overlapped_ = all_reduce_->Overlapped(rows);
  if (overlapped_ == nullptr) return absl::OkStatus();
  halves_ = CutStep(sequences);
  parts_.clear();
  for (int h = 0; h < 2; ++h) {
    const StepHalf& half = halves_.half[h];
    ISOBIT_ASSIGN_OR_RETURN(const SequenceTable table,
                            ops_.tables().StageHalf(h, half.sequences, page_size));
    parts_.push_back({.first_row = half.first_row, .rows = half.num_rows, .sequences = table});
  }
  return absl::OkStatus();
}

absl::Status Transformer::Layer(int layer, const BlockWeights& w, const Bf16* next_norm,
                                const KvCache& cache) {
  const ModelConfig& config = layout_.config();
  const auto heads = static_cast<int32_t>(layout_.shape().heads);
  const int64_t width = config.hidden_size;
  const LinearWeight qkv_weight = w.linear(Role::kQkv);
  const LinearWeight o = w.linear(Role::kO);
  const LinearWeight down = w.linear(Role::kDown);
  const int64_t qkv_columns = qkv_weight.shape.n;
  const Bf16* const input_norm = w.bf16(Role::kInputNorm);
  const Bf16* const post_norm = w.bf16(Role::kPostNorm);
  const PagedKv kv = cache.layer(layer);

  for (size_t p = 0; p < parts_.size(); ++p) {
    const Part& part = parts_[p];
    Bf16* const qkv = qkv_.data() + part.first_row * qkv_columns;
    Bf16* const attended = attended_.data() + part.first_row * o.shape.k;
    ISOBIT_ASSIGN_OR_RETURN(const Bf16* normed,
                            Normalise(p, input_norm, normed_.data() + part.first_row * width));
    ISOBIT_RETURN_IF_ERROR(ops_.Linear({.x = normed,
                                        .ldx = width,
                                        .m = part.rows,
                                        .weight = qkv_weight,
                                        .bias = w.fp32(Role::kQkvBias),
                                        .bf16_out = qkv,
                                        .ldy = qkv_columns,
                                        .mode = mode_}));
    ISOBIT_RETURN_IF_ERROR(ops_.Qkv({.qkv = qkv,
                                     .ld = qkv_columns,
                                     .heads = heads,
                                     .q_norm = w.bf16(Role::kQNorm),
                                     .k_norm = w.bf16(Role::kKNorm),
                                     .eps = config.rms_norm_eps,
                                     .cosine = reinterpret_cast<const float*>(cosine_.get()),
                                     .sine = reinterpret_cast<const float*>(sine_.get()),
                                     .sequences = part.sequences,
                                     .kv = kv}));
    ISOBIT_RETURN_IF_ERROR(ops_.Attention({.q = qkv,
                                           .ldq = qkv_columns,
                                           .heads = heads,
                                           .sequences = part.sequences,
                                           .kv = kv,
                                           .scale = contract::AttentionScale(config.head_dim),
                                           .window = config.WindowOfLayer(layer),
                                           .out = attended,
                                           .ldo = o.shape.k}));
    ISOBIT_RETURN_IF_ERROR(SumHalfBefore(p, p == 0 ? input_norm : post_norm));
    ISOBIT_RETURN_IF_ERROR(RowParallel(p, attended, o, w.fp32(Role::kOBias)));
  }

  for (size_t p = 0; p < parts_.size(); ++p) {
    const Part& part = parts_[p];
    Bf16* const activated = activated_.data() + part.first_row * down.shape.k;
    ISOBIT_ASSIGN_OR_RETURN(const Bf16* normed,
                            Normalise(p, post_norm, normed_.data() + part.first_row * width));
    ISOBIT_RETURN_IF_ERROR(ops_.Linear({.x = normed,
                                        .ldx = width,
                                        .m = part.rows,
                                        .weight = w.linear(Role::kGateUp),
                                        .bias = w.fp32(Role::kGateUpBias),
                                        .swiglu_out = activated,
                                        .ldy = down.shape.k,
                                        .mode = mode_}));
    ISOBIT_RETURN_IF_ERROR(SumHalfBefore(p, p == 0 ? post_norm : next_norm));
    ISOBIT_RETURN_IF_ERROR(RowParallel(p, activated, down, w.fp32(Role::kDownBias)));
  }
  return absl::OkStatus();
}

absl::Status Transformer::RowParallel(size_t p, const Bf16* x, const LinearWeight& weight,
                                      const float* bias) {
  Part& part = parts_[p];
  const int64_t width = layout_.config().hidden_size;
  const size_t element = has_bf16_partials() ? sizeof(Bf16) : sizeof(float);
  std::byte* const partial =
      partial_[turn_].data() + static_cast<size_t>(part.first_row * width) * element;
  turn_ = 1 - turn_;
  LinearArgs args = {
      .x = x, .ldx = weight.shape.k, .m = part.rows, .weight = weight, .ldy = width, .mode = mode_};
  if (has_bf16_partials()) {
    args.bf16_out = reinterpret_cast<Bf16*>(partial);
  } else {
    args.fp32_out = reinterpret_cast<float*>(partial);
    if (all_reduce_ != nullptr && overlapped_ == nullptr) args.push = all_reduce_->Push(part.rows);
  }
  ISOBIT_RETURN_IF_ERROR(ops_.Linear(args));
  part.partial = partial;
  part.bias = nullptr;
  if (bias != nullptr) {
    float* const copy = bias_.data() + static_cast<int64_t>(p) * width;
    ISOBIT_RETURN_IF_ERROR(
        ops_.device().Copy(copy, bias, static_cast<size_t>(width) * sizeof(float)));
    part.bias = copy;
  }
  if (overlapped_ == nullptr) return absl::OkStatus();
  part.travels = true;
  return overlapped_->Send(static_cast<int>(p), args.fp32_out, part.rows);
}

absl::StatusOr<const Bf16*> Transformer::Normalise(size_t p, const Bf16* weight, Bf16* out) {
  Part& part = parts_[p];
  if (part.travels) {
    ISOBIT_RETURN_IF_ERROR(Sum(p, weight));
    part.travels = false;
    return overlapped_->Receive(static_cast<int>(p));
  }
  const std::byte* const partial = std::exchange(part.partial, nullptr);
  RmsNormArgs args = NormArgs(part, weight, out);
  if (partial != nullptr && all_reduce_ != nullptr) {
    ISOBIT_RETURN_IF_ERROR(all_reduce_->Norm(partial, args));
    return out;
  }
  args.sum = reinterpret_cast<const float*>(partial);
  ISOBIT_RETURN_IF_ERROR(ops_.RmsNorm(args));
  return out;
}

absl::Status Transformer::SumHalfBefore(size_t p, const Bf16* weight) {
  const size_t before = parts_.size() - 1 - p;
  return parts_[before].travels ? Sum(before, weight) : absl::OkStatus();
}

absl::Status Transformer::Sum(size_t p, const Bf16* weight) {
  Part& part = parts_[p];
  if (std::exchange(part.partial, nullptr) == nullptr) return absl::OkStatus();
  Bf16* const out = normed_.data() + part.first_row * layout_.config().hidden_size;
  return overlapped_->Sum(static_cast<int>(p), NormArgs(part, weight, out));
}

RmsNormArgs Transformer::NormArgs(const Part& part, const Bf16* weight, Bf16* out) const {
  const ModelConfig& config = layout_.config();
  return {.residual = residual_.data() + part.first_row * config.hidden_size,
          .bias = part.bias,
          .weight = weight,
          .out = out,
          .rows = part.rows,
          .hidden = config.hidden_size,
          .eps = config.rms_norm_eps};
}

absl::Status Transformer::Logits(const Bf16* hidden, int64_t rows, WeightSource& weights,
                                 float* logits, int64_t ld) {
  ISOBIT_ASSIGN_OR_RETURN(const HeldBlock block, HeldBlock::Acquire(weights, layout_.head_block()));
  return ops_.Linear(
      {.x = hidden,
       .ldx = layout_.config().hidden_size,
       .m = rows,
       .weight = layout_.Bind(layout_.head_block(), block.bytes()).linear(Role::kHead),
       .fp32_out = logits,
       .ldy = ld,
       .mode = mode_});
}

}  // namespace isobit
