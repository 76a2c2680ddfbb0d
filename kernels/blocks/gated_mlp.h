// The MLP of a dense layer: down(SiLU(gate(x)) * up(x)).
#ifndef ISOBIT_KERNELS_BLOCKS_GATED_MLP_H_
#define ISOBIT_KERNELS_BLOCKS_GATED_MLP_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/checkpoint/model_config.h"
#include "common/checkpoint/tensor_plan.h"
#include "kernels/blocks/block.h"

namespace isobit {

class GatedMlp final : public Block {
 public:
  static constexpr char kKind[] = "gated_mlp";

  // Adds the parameters to `table`.
  GatedMlp(const ModelConfig& config, int layer, int index_in_layer, ParameterTable& table);

  std::vector<int64_t> Activations(const BlockWeights& shapes) const override;
  absl::Status Forward(const BlockPass& pass) const override;

  // Of `table`.
  ParameterIndex gate_up() const { return gate_up_; }
  ParameterIndex gate_up_bias() const { return gate_up_bias_; }
  ParameterIndex down() const { return down_; }
  ParameterIndex down_bias() const { return down_bias_; }

 private:
  ParameterIndex gate_up_, gate_up_bias_, down_, down_bias_;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_BLOCKS_GATED_MLP_H_
