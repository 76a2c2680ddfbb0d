// Products, rotation, the cache and softmax.
#include "kernels/blocks/attention.h"

#include "common/base/status_macros.h"
#include "kernels/contract/attention.h"
#include "kernels/ops/attention.h"
#include "kernels/ops/linear.h"
#include "kernels/ops/paged_kv.h"
#include "kernels/ops/qkv.h"

namespace isobit {
namespace {

PagedKv CacheOf(const BlockState& state, int64_t kv_heads, int32_t head_dim) {
  return {.k = reinterpret_cast<Bf16*>(state.planes),
          .v = reinterpret_cast<Bf16*>(state.planes + state.plane_stride),
          .page_size = state.page_size,
          .kv_heads = static_cast<int32_t>(kv_heads),
          .head_dim = head_dim};
}

}  // namespace

Attention::Attention(const ModelConfig& config, int layer, int index_in_layer,
                     ParameterTable& table)
    : Block(kKind, layer, index_in_layer),
      head_dim_(config.head_dim),
      window_(config.WindowOfLayer(layer)),
      eps_(config.rms_norm_eps) {
  const int64_t hidden = config.hidden_size;
  const int64_t query = int64_t{config.num_heads} * head_dim_;
  const int64_t kv = int64_t{config.num_kv_heads} * head_dim_;
  norm_ = table.Norm("input_norm", "input_layernorm", hidden);
  qkv_ = table.Linear({.name = "qkv",
                       .tensors = {{"self_attn.q_proj", {query, hidden}},
                                   {"self_attn.k_proj", {kv, hidden}},
                                   {"self_attn.v_proj", {kv, hidden}}},
                       .cut = Cut::kColumnParallel,
                       .units = config.num_kv_heads});
  qkv_bias_ = table.Bias(qkv_, config.qkv_bias);
  q_norm_ = table.HeadNorm("q_norm", "self_attn.q_norm", head_dim_, config.qk_norm);
  k_norm_ = table.HeadNorm("k_norm", "self_attn.k_norm", head_dim_, config.qk_norm);
  o_ = table.Linear({.name = "o",
                     .tensors = {{"self_attn.o_proj", {hidden, query}}},
                     .cut = Cut::kRowParallel,
                     .units = config.num_kv_heads});
  o_bias_ = table.Bias(o_, config.o_bias);
}

StateSpec Attention::State(const RankShape& rank) const {
  const auto values = static_cast<size_t>(rank.kv_heads.size() * head_dim_);
  return {.num_planes = 2, .plane_bytes = values * sizeof(Bf16)};  // keys, values
}

std::vector<int64_t> Attention::Activations(const BlockWeights& shapes) const {
  return {shapes.linear(qkv_).shape.n, shapes.linear(o_).shape.k};
}

absl::Status Attention::Forward(const BlockPass& pass) const {
  const BlockWeights& w = pass.weights;
  const LinearWeight weight = w.linear(qkv_);
  const auto heads = static_cast<int32_t>(pass.rank.heads);
  const PagedKv kv = CacheOf(pass.state, pass.rank.kv_heads.size(), head_dim_);
  Bf16* const qkv = pass.activations[0];
  Bf16* const attended = pass.activations[1];
  ISOBIT_RETURN_IF_ERROR(pass.ops.Run(LinearArgs{.x = pass.normed,
                                                 .ldx = weight.shape.k,
                                                 .m = pass.rows.rows,
                                                 .weight = weight,
                                                 .bias = w.fp32(qkv_bias_),
                                                 .bf16_out = qkv,
                                                 .ldy = weight.shape.n}));
  ISOBIT_RETURN_IF_ERROR(pass.ops.Run(QkvArgs{.qkv = qkv,
                                              .ld = weight.shape.n,
                                              .heads = heads,
                                              .q_norm = w.bf16(q_norm_),
                                              .k_norm = w.bf16(k_norm_),
                                              .eps = eps_,
                                              .cosine = pass.rope.cosine,
                                              .sine = pass.rope.sine,
                                              .sequences = pass.rows.sequences,
                                              .kv = kv}));
  ISOBIT_RETURN_IF_ERROR(pass.ops.Run(AttentionArgs{.q = qkv,
                                                    .ldq = weight.shape.n,
                                                    .heads = heads,
                                                    .sequences = pass.rows.sequences,
                                                    .kv = kv,
                                                    .scale = contract::AttentionScale(head_dim_),
                                                    .window = window_,
                                                    .out = attended,
                                                    .ldo = w.linear(o_).shape.k}));
  return pass.Add(attended, w.linear(o_), w.fp32(o_bias_));
}

}  // namespace isobit
