// The tensors that a checkpoint of a given config must hold, by their Hugging Face names.
#ifndef ISOBIT_COMMON_CHECKPOINT_TENSOR_NAMES_H_
#define ISOBIT_COMMON_CHECKPOINT_TENSOR_NAMES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "common/checkpoint/model_config.h"
#include "common/checkpoint/tensor_source.h"
#include "common/checkpoint/weight_reader.h"

namespace isobit {

inline constexpr char kEmbeddingName[] = "model.embed_tokens.weight";  // [vocab, hidden]
inline constexpr char kFinalNormName[] = "model.norm.weight";          // [hidden]
inline constexpr char kLmHeadName[] = "lm_head.weight";  // [vocab, hidden]; only when untied

// "model.layers.<layer>.<suffix>", for instance suffix "self_attn.q_proj.weight".
std::string LayerTensorName(int layer, absl::string_view suffix);

struct TensorSpec {
  std::string name;
  std::vector<int64_t> shape;  // weights are [out, in]

  size_t NumElements() const;
};

// In the order of a forward pass. A tied config has no lm_head.
std::vector<TensorSpec> ExpectedTensors(const ModelConfig& config);

// Whether `source` has the tensors of `config`. INVALID_ARGUMENT, naming up to five tensors of each
// kind: missing, unexpected, or of another shape. A tied config may come with an lm_head, whose
// bytes CheckTiedHead judges; rotary inv_freq buffers of old checkpoints are ignored.
absl::Status ValidateTensors(const ModelConfig& config, const TensorSource& source);

// INVALID_ARGUMENT: an lm_head that differs from the embedding to which the config ties it. Use the
// embedding.
absl::Status CheckTiedHead(const ModelConfig& config, const CheckpointDigests& digests);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_TENSOR_NAMES_H_
