// RMSNorm, SwiGLU, and q, k, v and their attention, with autograd.
#include "trainer_bridge/front/operator.h"
#include "trainer_bridge/front/ops.h"

namespace isobit::front {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

struct RmsNormNode : Function<RmsNormNode> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight, double eps,
                        const Bounds& packs) {
    static const auto op =
        Operator<Tensor(const Tensor&, const Tensor&, double, c10::IntArrayRef)>("rms_norm");
    ctx->save_for_backward({x, weight});
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["packs"] = packs;
    return op.call(x, weight, eps, packs);
  }
  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    static const auto op =
        Operator<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, double,
                                            c10::IntArrayRef)>("rms_norm_backward");
    const variable_list saved = ctx->get_saved_variables();
    auto [dx, dweight] =
        op.call(dy[0].contiguous(), saved[0], saved[1], ctx->saved_data["eps"].toDouble(),
                ctx->saved_data["packs"].toIntVector());
    return {dx, dweight, Tensor(), Tensor()};
  }
};

struct SwiGluNode : Function<SwiGluNode> {
  static Tensor forward(AutogradContext* ctx, const Tensor& gate_up) {
    static const auto op = Operator<Tensor(const Tensor&)>("swiglu");
    ctx->save_for_backward({gate_up});
    return op.call(gate_up);
  }
  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    static const auto op = Operator<Tensor(const Tensor&, const Tensor&)>("swiglu_backward");
    return {op.call(dy[0].contiguous(), ctx->get_saved_variables()[0])};
  }
};

struct QkvNode : Function<QkvNode> {
  static variable_list forward(AutogradContext* ctx, const Tensor& qkv, const MaybeTensor& q_norm,
                               const MaybeTensor& k_norm, const Tensor& positions,
                               const Tensor& cosine, const Tensor& sine, const HeadShape& shape,
                               const Bounds& packs) {
    static const auto op = Operator<std::tuple<Tensor, Tensor, Tensor>(
        const Tensor&, const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&,
        const MaybeTensor&, double, int64_t, int64_t, int64_t, c10::IntArrayRef)>("qkv");
    // Without norms the backward pass does not read their input.
    ctx->save_for_backward({q_norm ? qkv : Tensor(), q_norm.value_or(Tensor()),
                            k_norm.value_or(Tensor()), positions, cosine, sine});
    ctx->saved_data["shape"] = Bounds{shape.heads, shape.kv_heads, shape.head_dim};
    ctx->saved_data["eps"] = shape.eps;
    ctx->saved_data["packs"] = packs;
    auto [q, k, v] = op.call(qkv, positions, cosine, sine, q_norm, k_norm, shape.eps, shape.heads,
                             shape.kv_heads, shape.head_dim, packs);
    return {q, k, v};
  }
  static variable_list backward(AutogradContext* ctx, variable_list d) {
    static const auto op = Operator<std::tuple<Tensor, Tensor, Tensor>(
        const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&, const Tensor&,
        const Tensor&, const Tensor&, const MaybeTensor&, const MaybeTensor&, double, int64_t,
        int64_t, int64_t, c10::IntArrayRef)>("qkv_backward");
    const variable_list s = ctx->get_saved_variables();
    const Bounds shape = ctx->saved_data["shape"].toIntVector();
    auto [dqkv, dq_norm, dk_norm] =
        op.call(d[0].contiguous(), d[1].contiguous(), d[2].contiguous(), Maybe(s[0]), s[3], s[4],
                s[5], Maybe(s[1]), Maybe(s[2]), ctx->saved_data["eps"].toDouble(), shape[0],
                shape[1], shape[2], ctx->saved_data["packs"].toIntVector());
    const bool norms = s[1].defined();
    return {dqkv,
            norms ? dq_norm : Tensor(),
            norms ? dk_norm : Tensor(),
            Tensor(),
            Tensor(),
            Tensor(),
            Tensor(),
            Tensor()};
  }
};

struct AttentionNode : Function<AttentionNode> {
  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                        const Tensor& cu_seqlens, const Bounds& sequences, int64_t head_dim,
                        int64_t window) {
    static const auto op =
        Operator<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                            const Tensor&, c10::IntArrayRef, int64_t, int64_t)>(
            "attention");
    auto [out, log_sums] = op.call(q, k, v, cu_seqlens, sequences, head_dim, window);
    ctx->save_for_backward({q, k, v, out, log_sums, cu_seqlens});
    ctx->saved_data["sequences"] = sequences;
    ctx->saved_data["head_dim"] = head_dim;
    ctx->saved_data["window"] = window;
    return out;
  }
  static variable_list backward(AutogradContext* ctx, variable_list d) {
    static const auto op = Operator<std::tuple<Tensor, Tensor, Tensor>(
        const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
        const Tensor&, c10::IntArrayRef, int64_t, int64_t)>("attention_backward");
    const variable_list s = ctx->get_saved_variables();
    auto [dq, dk, dv] =
        op.call(d[0].contiguous(), s[0], s[1], s[2], s[3], s[4], s[5],
                ctx->saved_data["sequences"].toIntVector(), ctx->saved_data["head_dim"].toInt(),
                ctx->saved_data["window"].toInt());
    return {dq, dk, dv, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace

Tensor RmsNorm(const Tensor& x, const Tensor& weight, double eps, const Bounds& packs) {
  return RmsNormNode::apply(x, weight, eps, packs);
}

Tensor SwiGlu(const Tensor& gate_up) { return SwiGluNode::apply(gate_up); }

std::tuple<Tensor, Tensor, Tensor> Qkv(const Tensor& qkv, const TrainingBatch& batch,
                                       const Tensor& cosine, const Tensor& sine,
                                       const MaybeTensor& q_norm, const MaybeTensor& k_norm,
                                       const HeadShape& shape) {
  const variable_list out =
      QkvNode::apply(qkv, q_norm, k_norm, batch.positions, cosine, sine, shape, batch.packs);
  return {out[0], out[1], out[2]};
}

Tensor Attention(const Tensor& q, const Tensor& k, const Tensor& v, const TrainingBatch& batch,
                 int64_t head_dim, int64_t window) {
  return AttentionNode::apply(q, k, v, batch.cu_seqlens, batch.sequences, head_dim, window);
}

}  // namespace isobit::front
