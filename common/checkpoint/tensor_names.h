// Names of checkpoint tensors that need special treatment.
#ifndef ISOBIT_COMMON_CHECKPOINT_TENSOR_NAMES_H_
#define ISOBIT_COMMON_CHECKPOINT_TENSOR_NAMES_H_

#include "absl/strings/string_view.h"

namespace isobit {

inline constexpr char kEmbeddingName[] = "model.embed_tokens.weight";
inline constexpr char kHeadName[] = "lm_head.weight";

// Whether the tensor is a buffer of a rotary embedding, such as
// "model.layers.0.self_attn.rotary_emb.inv_freq" or "rotary_emb.cos_cached". Old checkpoints have
// them, but they are not used: the frequencies follow from the config.
bool IsRotaryBuffer(absl::string_view name);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_TENSOR_NAMES_H_
