// Names and shapes of decoder weights, and the comparison of a checkpoint with them.
#include "common/checkpoint/tensor_names.h"

#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/checkpoint/strict_json.h"  // Quoted

namespace isobit {
namespace {

void AppendLayer(const ModelConfig& config, int layer, std::vector<TensorSpec>& specs) {
  const int64_t hidden = config.hidden_size;
  const int64_t intermediate = config.intermediate_size;
  const int64_t query = int64_t{config.num_heads} * config.head_dim;
  const int64_t kv = int64_t{config.num_kv_heads} * config.head_dim;
  const auto vector = [&](absl::string_view suffix, int64_t size) {
    specs.push_back({LayerTensorName(layer, suffix), {size}});
  };
  const auto linear = [&](absl::string_view module, int64_t out, int64_t in, bool bias) {
    specs.push_back({LayerTensorName(layer, absl::StrCat(module, ".weight")), {out, in}});
    if (bias) vector(absl::StrCat(module, ".bias"), out);
  };
  vector("input_layernorm.weight", hidden);
  linear("self_attn.q_proj", query, hidden, config.qkv_bias);
  linear("self_attn.k_proj", kv, hidden, config.qkv_bias);
  linear("self_attn.v_proj", kv, hidden, config.qkv_bias);
  if (config.qk_norm) {
    vector("self_attn.q_norm.weight", config.head_dim);
    vector("self_attn.k_norm.weight", config.head_dim);
  }
  linear("self_attn.o_proj", hidden, query, config.o_bias);
  vector("post_attention_layernorm.weight", hidden);
  linear("mlp.gate_proj", intermediate, hidden, config.mlp_bias);
  linear("mlp.up_proj", intermediate, hidden, config.mlp_bias);
  linear("mlp.down_proj", hidden, intermediate, config.mlp_bias);
}

// "missing: a, b and 3 more; " or nothing.
void AppendProblem(absl::string_view kind, const std::vector<std::string>& tensors,
                   std::string& problems) {
  constexpr size_t kShown = 5;
  if (tensors.empty()) return;
  const size_t shown = std::min(kShown, tensors.size());
  absl::StrAppend(&problems, problems.empty() ? "" : "; ", kind, ": ",
                  absl::StrJoin(tensors.begin(), tensors.begin() + shown, ", "));
  if (tensors.size() > shown) absl::StrAppend(&problems, " and ", tensors.size() - shown, " more");
}

}  // namespace

std::string LayerTensorName(int layer, absl::string_view suffix) {
  return absl::StrCat("model.layers.", layer, ".", suffix);
}

size_t TensorSpec::NumElements() const {
  size_t count = 1;
  for (const int64_t size : shape) count *= static_cast<size_t>(size);
  return count;
}

std::vector<TensorSpec> ExpectedTensors(const ModelConfig& config) {
  std::vector<TensorSpec> specs;
  specs.push_back({kEmbeddingName, {config.vocab_size, config.hidden_size}});
  for (int layer = 0; layer < config.num_layers; ++layer) AppendLayer(config, layer, specs);
  specs.push_back({kFinalNormName, {config.hidden_size}});
  if (!config.tie_word_embeddings) {
    specs.push_back({kLmHeadName, {config.vocab_size, config.hidden_size}});
  }
  return specs;
}

absl::Status ValidateTensors(const ModelConfig& config, const TensorSource& source) {
  std::vector<std::string> missing, unexpected, misshapen;
  std::set<std::string> expected;
  for (const TensorSpec& spec : ExpectedTensors(config)) {
    expected.insert(spec.name);
    const Tensor* tensor = source.Find(spec.name);
    if (tensor == nullptr) {
      missing.push_back(spec.name);
    } else if (tensor->shape != spec.shape) {
      misshapen.push_back(absl::StrCat(spec.name, " is ", ShapeString(tensor->shape), ", expected ",
                                       ShapeString(spec.shape)));
    }
  }
  for (const Tensor& tensor : source.tensors()) {
    if (expected.count(tensor.name) != 0 || absl::EndsWith(tensor.name, "rotary_emb.inv_freq")) {
      continue;
    }
    if (config.tie_word_embeddings && tensor.name == kLmHeadName) continue;
    unexpected.push_back(Quoted(tensor.name));
  }
  std::string problems;
  AppendProblem("missing tensors", missing, problems);
  AppendProblem("unexpected tensors", unexpected, problems);
  AppendProblem("tensors of another shape", misshapen, problems);
  return problems.empty() ? absl::OkStatus() : absl::InvalidArgumentError(problems);
}

absl::Status CheckTiedHead(const ModelConfig& config, const CheckpointDigests& digests) {
  const auto head = digests.tensors.find(kLmHeadName);
  if (!config.tie_word_embeddings || head == digests.tensors.end() ||
      head->second == digests.tensors.at(kEmbeddingName)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("tensor ", kLmHeadName, " differs from ",
                                                 kEmbeddingName, ", to which config.json ties it"));
}

}  // namespace isobit
