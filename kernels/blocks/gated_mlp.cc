// Two products, SwiGLU in the first one's epilogue.
#include "kernels/blocks/gated_mlp.h"

#include "common/base/status_macros.h"
#include "kernels/ops/linear.h"

namespace isobit {

GatedMlp::GatedMlp(const ModelConfig& config, int layer, int index_in_layer, ParameterTable& table)
    : Block(kKind, layer, index_in_layer) {
  const int64_t hidden = config.hidden_size;
  const int64_t intermediate = config.intermediate_size;
  norm_ = table.Norm("post_norm", "post_attention_layernorm", hidden);
  gate_up_ = table.Linear({.name = "gate_up",
                           .tensors = {{"mlp.gate_proj", {intermediate, hidden}},
                                       {"mlp.up_proj", {intermediate, hidden}}},
                           .cut = Cut::kColumnParallel,
                           .gated = true});
  gate_up_bias_ = table.Bias(gate_up_, config.mlp_bias);
  down_ = table.Linear({.name = "down",
                        .tensors = {{"mlp.down_proj", {hidden, intermediate}}},
                        .cut = Cut::kRowParallel});
  down_bias_ = table.Bias(down_, config.mlp_bias);
}

std::vector<int64_t> GatedMlp::Activations(const BlockWeights& shapes) const {
  return {shapes.linear(down_).shape.k};
}

absl::Status GatedMlp::Forward(const BlockPass& pass) const {
  const BlockWeights& w = pass.weights;
  const LinearWeight gate_up = w.linear(gate_up_);
  const LinearWeight down = w.linear(down_);
  Bf16* const activated = pass.activations[0];
  ISOBIT_RETURN_IF_ERROR(pass.ops.Run(LinearArgs{.x = pass.normed,
                                                 .ldx = gate_up.shape.k,
                                                 .m = pass.rows.rows,
                                                 .weight = gate_up,
                                                 .bias = w.fp32(gate_up_bias_),
                                                 .swiglu_out = activated,
                                                 .ldy = down.shape.k}));
  return pass.Add(activated, down, w.fp32(down_bias_));
}

}  // namespace isobit
