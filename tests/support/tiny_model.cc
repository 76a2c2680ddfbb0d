// Makes and writes tiny models. Weights come from integer arithmetic, so that their golden digests
// are the same on every machine.
#include "tests/support/tiny_model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/base/check.h"
#include "common/checkpoint/safetensors.h"
#include "common/checkpoint/tensor_names.h"
#include "kernels/model/model_plan.h"

namespace isobit::testing_support {
namespace {

// SplitMix64 (Steele, Lea, Flood 2014).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t Next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  // Nearly normal, with variance 1: the sum of four uniform numbers, each exact in float.
  float NextNormal() {
    const uint64_t bits = Next();
    int sum = -2 * 65535;
    for (int i = 0; i < 4; ++i) sum += static_cast<int>((bits >> (16 * i)) & 0xffff);
    return static_cast<float>(sum) * 0x1.bb67aep-16f;  // sqrt(3) / 65536
  }

 private:
  uint64_t state_;
};

struct Distribution {
  float mean;
  float deviation;
};

Distribution DistributionOf(const ExpectedTensor& spec) {
  if (spec.op == ParameterOp::kNorm || spec.op == ParameterOp::kHeadNorm) return {1.0f, 0.125f};
  if (spec.op == ParameterOp::kBias) return {0.0f, 0.25f};
  const float unit = 1.0f / std::sqrt(static_cast<float>(spec.shape[1]));
  const bool head = spec.op == ParameterOp::kEmbedding || spec.name == kHeadName;
  return {0.0f, head ? 2.0f * unit : unit};
}

// A model's tensors, each bias right after its module's weight. The golden digests depend on this
// order, in which weights are drawn.
std::vector<ExpectedTensor> DrawingOrder(const ModelConfig& config) {
  const std::vector<ExpectedTensor> specs = ExpectedTensors(ModelPlan(config));
  std::vector<ExpectedTensor> order;
  for (const ExpectedTensor& spec : specs) {
    if (spec.op == ParameterOp::kBias) continue;
    order.push_back(spec);
    const std::string bias = absl::StrCat(absl::StripSuffix(spec.name, "weight"), "bias");
    const auto found = std::ranges::find(specs, bias, &ExpectedTensor::name);
    if (found != specs.end()) order.push_back(*found);
  }
  return order;
}

}  // namespace

ModelConfig TinyConfig(Architecture architecture) {
  ModelConfig c;
  c.architecture = architecture;
  c.vocab_size = 101;
  c.hidden_size = 40;
  c.intermediate_size = 72;
  c.num_layers = 2;
  c.num_heads = 9;
  c.num_kv_heads = 3;
  c.head_dim = 8;
  c.rms_norm_eps = 1e-5f;
  c.max_position_embeddings = 512;
  c.eos_token_ids = {1};
  switch (architecture) {
    case Architecture::kLlama:
      c.rope_scaling = {.type = RopeType::kLlama3,
                        .factor = 8,
                        .low_freq_factor = 1,
                        .high_freq_factor = 4,
                        .original_max_position_embeddings = 64};
      c.tie_word_embeddings = true;
      break;
    case Architecture::kMistral:
      c.layer_windows = {24, 24};
      break;
    case Architecture::kQwen2:
      c.qkv_bias = true;
      c.tie_word_embeddings = true;
      break;
    case Architecture::kQwen3:
      c.qk_norm = true;
      c.rope_theta = 1000000;
      break;
  }
  const absl::Status valid = ValidateModelConfig(c);
  ISOBIT_CHECK(valid.ok()) << valid.ToString();
  return c;
}

TinyWeights RandomWeights(const ModelConfig& config, uint64_t seed) {
  Random random(seed);
  TinyWeights weights;
  for (const ExpectedTensor& spec : DrawingOrder(config)) {
    const size_t count = spec.NumElements();
    const Distribution distribution = DistributionOf(spec);
    std::vector<uint16_t>& values = weights.tensors[spec.name];
    for (size_t i = 0; i < count; ++i) {
      const float value = distribution.mean + distribution.deviation * random.NextNormal();
      values.push_back(Bf16FromF32Bits(std::bit_cast<uint32_t>(value)));
    }
  }
  return weights;
}

void WriteModel(const ModelConfig& config, const TinyWeights& weights,
                const std::string& directory) {
  std::filesystem::create_directories(directory);
  absl::Status status = WriteConfigJson(config, directory);
  ISOBIT_CHECK(status.ok()) << status.ToString();
  std::vector<Tensor> tensors;
  for (const ExpectedTensor& spec : ExpectedTensors(ModelPlan(config))) {
    const auto found = weights.tensors.find(spec.name);
    if (found == weights.tensors.end()) continue;
    const std::vector<uint16_t>& values = found->second;
    tensors.push_back({.name = spec.name,
                       .dtype = DType::kBf16,
                       .shape = spec.shape,
                       .data = reinterpret_cast<const uint8_t*>(values.data()),
                       .size_bytes = values.size() * sizeof(uint16_t)});
  }
  status = WriteSafetensors(directory + "/model.safetensors", std::move(tensors));
  ISOBIT_CHECK(status.ok()) << status.ToString();
}

void WriteTinyModel(const ModelConfig& config, uint64_t seed, const std::string& directory) {
  WriteModel(config, RandomWeights(config, seed), directory);
}

}  // namespace isobit::testing_support
