// What a trainer needs of a model's config, from the same parser that the services have.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/checkpoint/model_config.h"
#include "kernels/model/model_plan.h"
#include "kernels/model/numerics.h"
#include "trainer_bridge/torch/call.h"
#include "trainer_bridge/torch/operators.h"

namespace isobit::bridge {
namespace {

// ignored_fields: names with commas between them.
ModelConfig Parse(const char* op, const std::string& config_json,
                  const std::string& ignored_fields) {
  const LoadPolicy policy = {.ignored_fields =
                                 absl::StrSplit(ignored_fields, ',', absl::SkipEmpty())};
  absl::StatusOr<ModelConfig> config = ParseModelConfig(config_json, "", policy);
  if (config.ok()) return *std::move(config);
  throw std::runtime_error(absl::StrCat("isobit::", op, ": ", config.status().message()));
}

Tensor ToTensor(const std::vector<float>& values, int64_t rows, int64_t columns) {
  const Shape shape = {rows, columns};
  Tensor t = torch::stable::empty(shape, DtypeOf<float>());
  std::copy(values.begin(), values.end(), static_cast<float*>(t.mutable_data_ptr()));
  return t;
}

std::string ModelFacts(const std::string& config_json, const std::string& ignored_fields) {
  const FloatEnvironment environment;
  const ModelConfig config = Parse("model_facts", config_json, ignored_fields);
  // [layer][block]: the kinds, by which isobit.torch.blocks finds the training passes.
  std::vector<std::vector<std::string>> layers(static_cast<size_t>(config.num_layers));
  std::vector<int> windows;
  for (const auto& block : ModelPlan(config).blocks) {
    layers[static_cast<size_t>(block->layer())].emplace_back(block->kind());
  }
  for (int layer = 0; layer < config.num_layers; ++layer) {
    windows.push_back(config.WindowOfLayer(layer));
  }
  const nlohmann::json facts = {{"vocab", config.vocab_size},
                                {"hidden", config.hidden_size},
                                {"intermediate", config.intermediate_size},
                                {"layers", layers},
                                {"heads", config.num_heads},
                                {"kv_heads", config.num_kv_heads},
                                {"head_dim", config.head_dim},
                                {"eps", config.rms_norm_eps},
                                {"max_positions", config.max_position_embeddings},
                                {"tied", config.tie_word_embeddings},
                                {"qk_norm", config.qk_norm},
                                {"windows", windows}};
  return facts.dump();
}

std::tuple<Tensor, Tensor> RopeTable(const std::string& config_json, int64_t positions) {
  const FloatEnvironment environment;
  const ModelConfig config = Parse("rope_table", config_json, "");
  if (positions < 1 || positions > (1 << 20)) {
    throw std::runtime_error(
        absl::StrCat("isobit::rope_table: positions: expected 1 to 1048576, got ", positions));
  }
  const contract::RopeTable table = RopeTableOf(config, positions);
  return {ToTensor(table.cosine, positions, config.head_dim / 2),
          ToTensor(table.sine, positions, config.head_dim / 2)};
}

constexpr Operator kOperators[] = {
    {"model_facts(str config_json, str ignored_fields) -> str", TORCH_BOX(&ModelFacts)},
    {"rope_table(str config_json, int positions) -> (Tensor, Tensor)", TORCH_BOX(&RopeTable)},
};

}  // namespace

ISOBIT_OPERATORS(kOperators)

}  // namespace isobit::bridge
