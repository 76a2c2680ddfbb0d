// The last block: the norm of the residual stream, and the product that gives logits.
#ifndef ISOBIT_KERNELS_BLOCKS_HEAD_H_
#define ISOBIT_KERNELS_BLOCKS_HEAD_H_

#include <cstdint>

#include "absl/status/status.h"
#include "common/checkpoint/model_config.h"
#include "common/checkpoint/tensor_plan.h"
#include "kernels/blocks/block_weights.h"
#include "kernels/ops/linear.h"
#include "kernels/ops/op_table.h"

namespace isobit {

class Head {
 public:
  // A tied head is packed a second time, from the embedding's tensor.
  Head(const ModelConfig& config, ParameterTable& table)
      : norm_(table.Norm("final_norm", "model.norm", config.hidden_size)),
        linear_(table.Linear(
            {.name = "head",
             .tensors = {{config.tie_word_embeddings ? "model.embed_tokens" : "lm_head",
                          {config.vocab_size, config.hidden_size}}},
             .cut = Cut::kColumnParallel})) {}

  // logits: [rows, this rank's columns] fp32, with leading dimension ld. normed: [rows,
  // hidden_size].
  absl::Status Logits(const OpTable& ops, const BlockWeights& weights, const Bf16* normed,
                      int64_t rows, float* logits, int64_t ld) const {
    const LinearWeight weight = weights.linear(linear_);
    return ops.Run(LinearArgs{.x = normed,
                              .ldx = weight.shape.k,
                              .m = rows,
                              .weight = weight,
                              .fp32_out = logits,
                              .ldy = ld});
  }

  ParameterIndex norm() const { return norm_; }
  ParameterIndex linear() const { return linear_; }

 private:
  const ParameterIndex norm_;
  const ParameterIndex linear_;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_BLOCKS_HEAD_H_
