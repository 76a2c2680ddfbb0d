// The forward pass: embedding, layers, final norm, logits. See transformer.h.
#include "kernels/model/transformer.h"

#include <algorithm>
#include <utility>

#include "common/base/status_macros.h"
#include "kernels/contract/attention.h"

namespace isobit {
namespace {

// Releases a weight block when it goes out of scope.
class HeldBlock {
 public:
  HeldBlock(WeightSource& weights, int block) : weights_(weights), block_(block) {}
  ~HeldBlock() { weights_.Release(block_); }
  HeldBlock(const HeldBlock&) = delete;
  HeldBlock& operator=(const HeldBlock&) = delete;

 private:
  WeightSource& weights_;
  const int block_;
};

}  // namespace

absl::StatusOr<KvCache> KvCache::Create(const ModelConfig& config, const RankShape& shape,
                                        int32_t num_pages, int32_t page_size, bool shared_layers,
                                        Ops& ops) {
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
  ISOBIT_ASSIGN_OR_RETURN(cache.memory_, ops.Allocate(cache.bytes_));
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
absl::StatusOr<T*> Transformer::Buffer<T>::Reserve(Ops& ops, int64_t elements) {
  const size_t bytes = static_cast<size_t>(elements) * sizeof(T);
  if (memory_ == nullptr || bytes_ < bytes) {
    memory_ = nullptr;  // before its successor is allocated
    ISOBIT_ASSIGN_OR_RETURN(memory_, ops.Allocate(bytes));
    bytes_ = bytes;
  }
  return data();
}

Transformer::Transformer(const WeightLayout& layout, const contract::RopeTable& rope,
                         NumericsMode mode, Ops& ops, AllReduce* all_reduce)
    : layout_(layout), rope_(rope), mode_(mode), ops_(ops), all_reduce_(all_reduce) {}

absl::Status Transformer::Reserve(int64_t rows) {
  const RankShape& shape = layout_.shape();
  const int64_t width = layout_.config().hidden_size;
  const int64_t partial_bytes =
      rows * width * static_cast<int64_t>(has_bf16_partials() ? sizeof(Bf16) : sizeof(float));
  ISOBIT_RETURN_IF_ERROR(residual_.Reserve(ops_, rows * width).status());
  ISOBIT_RETURN_IF_ERROR(normed_.Reserve(ops_, rows * width).status());
  ISOBIT_RETURN_IF_ERROR(qkv_.Reserve(ops_, rows * shape.qkv.n).status());
  ISOBIT_RETURN_IF_ERROR(attended_.Reserve(ops_, rows * shape.o.k).status());
  ISOBIT_RETURN_IF_ERROR(activated_.Reserve(ops_, rows * shape.down.k).status());
  ISOBIT_RETURN_IF_ERROR(partial_[0].Reserve(ops_, partial_bytes).status());
  ISOBIT_RETURN_IF_ERROR(partial_[1].Reserve(ops_, partial_bytes).status());
  ISOBIT_RETURN_IF_ERROR(bias_.Reserve(ops_, width).status());
  return cosine_ == nullptr ? ShareRope() : absl::OkStatus();
}

size_t Transformer::ReservedBytes(const WeightLayout& layout, int64_t rows) {
  const RankShape& shape = layout.shape();
  const int64_t width = layout.config().hidden_size;
  const int64_t bf16 = 2 * width + shape.qkv.n + shape.o.k + shape.down.k;
  return static_cast<size_t>(rows) * (static_cast<size_t>(bf16) * sizeof(Bf16) +
                                      2 * static_cast<size_t>(width) * sizeof(float));
}

absl::Status Transformer::ShareRope() {
  const auto share = [this](const std::vector<float>& table) {
    const auto* bytes = reinterpret_cast<const std::byte*>(table.data());
    return ops_.Share({std::shared_ptr<const void>(), bytes}, table.size() * sizeof(float));
  };
  ISOBIT_ASSIGN_OR_RETURN(cosine_, share(rope_.cosine));
  ISOBIT_ASSIGN_OR_RETURN(sine_, share(rope_.sine));
  return absl::OkStatus();
}

absl::Status Transformer::Forward(const Batch& batch, WeightSource& weights, const KvCache& cache,
                                  Bf16* hidden) {
  ISOBIT_ASSIGN_OR_RETURN(const StagedStep step,
                          ops_.Stage(batch.ids, batch.sequences, cache.page_size()));
  return Forward(step, static_cast<int64_t>(batch.ids.size()), weights, cache, hidden);
}

absl::Status Transformer::Forward(const StagedStep& step, int64_t rows, WeightSource& weights,
                                  const KvCache& cache, Bf16* hidden) {
  pending_partial_ = nullptr;
  ISOBIT_RETURN_IF_ERROR(Reserve(rows));
  {
    ISOBIT_ASSIGN_OR_RETURN(const std::byte* block, weights.Acquire(0));
    const HeldBlock held(weights, 0);
    ISOBIT_RETURN_IF_ERROR(ops_.Embedding({.ids = step.ids,
                                           .rows = rows,
                                           .table = layout_.BindEmbedding(block),
                                           .hidden = layout_.config().hidden_size,
                                           .out = residual_.data()}));
  }
  for (int layer = 0; layer < layout_.config().num_layers; ++layer) {
    ISOBIT_ASSIGN_OR_RETURN(const std::byte* block, weights.Acquire(layer + 1));
    const HeldBlock held(weights, layer + 1);
    ISOBIT_RETURN_IF_ERROR(Layer(layer, rows, step.sequences, layout_.BindLayer(block), cache));
  }
  ISOBIT_ASSIGN_OR_RETURN(const std::byte* block, weights.Acquire(layout_.head_block()));
  const HeldBlock held(weights, layout_.head_block());
  return Norm(layout_.BindHead(block).norm, rows, hidden);
}

absl::Status Transformer::Layer(int layer, int64_t rows, const SequenceTable& sequences,
                                const LayerWeights& w, const KvCache& cache) {
  const ModelConfig& config = layout_.config();
  const RankShape& shape = layout_.shape();
  const int64_t width = config.hidden_size;
  const int64_t qkv_columns = shape.qkv.n;
  Bf16* const normed = normed_.data();
  Bf16* const qkv = qkv_.data();
  Bf16* const attended = attended_.data();
  Bf16* const activated = activated_.data();

  ISOBIT_RETURN_IF_ERROR(Norm(w.input_norm, rows, normed));
  ISOBIT_RETURN_IF_ERROR(ops_.Linear({.x = normed,
                                      .ldx = width,
                                      .m = rows,
                                      .weight = w.qkv,
                                      .bias = w.qkv_bias,
                                      .bf16_out = qkv,
                                      .ldy = qkv_columns,
                                      .mode = mode_}));
  const PagedKv kv = cache.layer(layer);
  ISOBIT_RETURN_IF_ERROR(ops_.Qkv({.qkv = qkv,
                                   .ld = qkv_columns,
                                   .heads = static_cast<int32_t>(shape.heads),
                                   .q_norm = w.q_norm,
                                   .k_norm = w.k_norm,
                                   .eps = config.rms_norm_eps,
                                   .cosine = reinterpret_cast<const float*>(cosine_.get()),
                                   .sine = reinterpret_cast<const float*>(sine_.get()),
                                   .sequences = sequences,
                                   .kv = kv}));
  ISOBIT_RETURN_IF_ERROR(ops_.Attention({.q = qkv,
                                         .ldq = qkv_columns,
                                         .heads = static_cast<int32_t>(shape.heads),
                                         .sequences = sequences,
                                         .kv = kv,
                                         .scale = contract::AttentionScale(config.head_dim),
                                         .window = config.WindowOfLayer(layer),
                                         .out = attended,
                                         .ldo = shape.o.k}));
  ISOBIT_RETURN_IF_ERROR(RowParallel(attended, w.o, w.o_bias, rows));

  ISOBIT_RETURN_IF_ERROR(Norm(w.post_norm, rows, normed));
  ISOBIT_RETURN_IF_ERROR(ops_.Linear({.x = normed,
                                      .ldx = width,
                                      .m = rows,
                                      .weight = w.gate_up,
                                      .bias = w.gate_up_bias,
                                      .swiglu_out = activated,
                                      .ldy = shape.down.k,
                                      .mode = mode_}));
  return RowParallel(activated, w.down, w.down_bias, rows);
}

absl::Status Transformer::RowParallel(const Bf16* x, const LinearWeight& weight, const float* bias,
                                      int64_t rows) {
  const int64_t width = layout_.config().hidden_size;
  std::byte* const partial = partial_[turn_].data();
  turn_ = 1 - turn_;
  LinearArgs args = {
      .x = x, .ldx = weight.shape.k, .m = rows, .weight = weight, .ldy = width, .mode = mode_};
  if (has_bf16_partials()) {
    args.bf16_out = reinterpret_cast<Bf16*>(partial);
  } else {
    args.fp32_out = reinterpret_cast<float*>(partial);
  }
  ISOBIT_RETURN_IF_ERROR(ops_.Linear(args));
  pending_partial_ = partial;
  pending_bias_ = nullptr;
  if (bias != nullptr) {
    ISOBIT_RETURN_IF_ERROR(
        ops_.Copy(bias_.data(), bias, static_cast<size_t>(width) * sizeof(float)));
    pending_bias_ = bias_.data();
  }
  return absl::OkStatus();
}

absl::Status Transformer::Norm(const Bf16* weight, int64_t rows, Bf16* out) {
  const ModelConfig& config = layout_.config();
  const std::byte* const partial = std::exchange(pending_partial_, nullptr);
  RmsNormArgs args = {.residual = residual_.data(),
                      .bias = partial != nullptr ? pending_bias_ : nullptr,
                      .weight = weight,
                      .out = out,
                      .rows = rows,
                      .hidden = config.hidden_size,
                      .eps = config.rms_norm_eps};
  if (partial != nullptr && all_reduce_ != nullptr) return all_reduce_->Norm(partial, args);
  args.sum = reinterpret_cast<const float*>(partial);
  return ops_.RmsNorm(args);
}

absl::Status Transformer::Logits(const Bf16* hidden, int64_t rows, WeightSource& weights,
                                 float* logits, int64_t ld) {
  const int block_number = layout_.head_block();
  ISOBIT_ASSIGN_OR_RETURN(const std::byte* block, weights.Acquire(block_number));
  const HeldBlock held(weights, block_number);
  return ops_.Linear({.x = hidden,
                      .ldx = layout_.config().hidden_size,
                      .m = rows,
                      .weight = layout_.BindHead(block).head,
                      .fp32_out = logits,
                      .ldy = ld,
                      .mode = mode_});
}

}  // namespace isobit
