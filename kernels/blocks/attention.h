// Softmax attention with grouped KV heads, rotary positions and, if the model has them, biases,
// norms of query and key heads, and a sliding window: Llama, Mistral, Qwen2, Qwen3.
#ifndef ISOBIT_KERNELS_BLOCKS_ATTENTION_H_
#define ISOBIT_KERNELS_BLOCKS_ATTENTION_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/checkpoint/model_config.h"
#include "common/checkpoint/tensor_plan.h"
#include "kernels/blocks/block.h"

namespace isobit {

class Attention final : public Block {
 public:
  static constexpr char kKind[] = "attention";

  // Adds the parameters to `table`.
  Attention(const ModelConfig& config, int layer, int index_in_layer, ParameterTable& table);

  StateSpec State(const RankShape& rank) const override;
  std::vector<int64_t> Activations(const BlockWeights& shapes) const override;
  absl::Status Forward(const BlockPass& pass) const override;

  // Of `table`.
  ParameterIndex qkv() const { return qkv_; }
  ParameterIndex qkv_bias() const { return qkv_bias_; }
  ParameterIndex q_norm() const { return q_norm_; }
  ParameterIndex k_norm() const { return k_norm_; }
  ParameterIndex o() const { return o_; }
  ParameterIndex o_bias() const { return o_bias_; }
  int32_t window() const { return window_; }  // positions that a token sees; 0: all

 private:
  const int32_t head_dim_;
  const int32_t window_;
  const float eps_;
  ParameterIndex qkv_, qkv_bias_, q_norm_, k_norm_, o_, o_bias_;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_BLOCKS_ATTENTION_H_
