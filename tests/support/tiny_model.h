// Random model directories, small enough for the scalar oracle: the models that tests load.
#ifndef ISOBIT_TESTS_SUPPORT_TINY_MODEL_H_
#define ISOBIT_TESTS_SUPPORT_TINY_MODEL_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "common/checkpoint/model_config.h"

namespace isobit::testing_support {

// Two layers with awkward sizes: heads that four ranks cannot share equally, a hidden size that is
// no multiple of 16, a vocabulary that is no multiple of 8. Token 1 ends a sequence.
ModelConfig TinyConfig(Architecture architecture);

// The bf16 weights of a model in memory, for tests that change some before they write them.
struct TinyWeights {
  std::map<std::string, std::vector<uint16_t>> tensors;  // by name, row-major
};

// A pure function of its arguments, on every machine: nearly normal weights, scaled so that
// activations keep their size through the layers and logits spread over a few units.
TinyWeights RandomWeights(const ModelConfig& config, uint64_t seed);

// Writes config.json, generation_config.json and model.safetensors into `directory`, creating it.
void WriteModel(const ModelConfig& config, const TinyWeights& weights,
                const std::string& directory);

// WriteModel of RandomWeights.
void WriteTinyModel(const ModelConfig& config, uint64_t seed, const std::string& directory);

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_SUPPORT_TINY_MODEL_H_
