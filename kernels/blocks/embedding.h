// The first block: the rows of a table, which become the residual stream.
#ifndef ISOBIT_KERNELS_BLOCKS_EMBEDDING_H_
#define ISOBIT_KERNELS_BLOCKS_EMBEDDING_H_

#include <cstdint>

#include "absl/status/status.h"
#include "common/checkpoint/model_config.h"
#include "common/checkpoint/tensor_plan.h"
#include "kernels/blocks/block_weights.h"
#include "kernels/ops/embedding.h"
#include "kernels/ops/op_table.h"

namespace isobit {

class Embedding {
 public:
  Embedding(const ModelConfig& config, ParameterTable& table)
      : hidden_(config.hidden_size),
        table_(table.Embedding("embedding", "model.embed_tokens", {config.vocab_size, hidden_})) {}

  // out: [rows, hidden_size], from ids [rows].
  absl::Status Forward(const OpTable& ops, const BlockWeights& weights, const int32_t* ids,
                       int64_t rows, Bf16* out) const {
    return ops.Run(EmbeddingArgs{
        .ids = ids, .rows = rows, .table = weights.bf16(table_), .hidden = hidden_, .out = out});
  }

  ParameterIndex table() const { return table_; }

 private:
  const int64_t hidden_;
  const ParameterIndex table_;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_BLOCKS_EMBEDDING_H_
