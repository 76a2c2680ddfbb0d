// The model shapes that isobit-model and the tests know by name.
#ifndef ISOBIT_TOOLS_MODEL_SHAPES_H_
#define ISOBIT_TOOLS_MODEL_SHAPES_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/checkpoint/model_config.h"

namespace isobit {

// The config of a named shape. NOT_FOUND, listing all names: there is no such name.
//
// tiny-qwen3, tiny-qwen2, tiny-llama and tiny-mistral have awkward shapes on purpose: 9 query heads
// on 3 KV heads, a head_dim other than hidden_size / num_heads, and a hidden size, an intermediate
// size and a vocabulary that no power of two divides. Among them are llama3 rope scaling, a sliding
// window, q/k norms and biases. The others are the shapes of published models.
absl::StatusOr<ModelConfig> NamedModelShape(const std::string& name);

// Sorted.
std::vector<std::string> ModelShapeNames();

}  // namespace isobit

#endif  // ISOBIT_TOOLS_MODEL_SHAPES_H_
