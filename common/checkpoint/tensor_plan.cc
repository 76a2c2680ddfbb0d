// The tables. See model_plan.h.
#include "common/checkpoint/tensor_plan.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/checkpoint/tensor_names.h"

namespace isobit {
namespace {

// The rows of one block, whose tensors are called "<prefix><module>.weight" and ".bias".
class BlockTable {
 public:
  explicit BlockTable(std::string prefix) : prefix_(std::move(prefix)) {}

  void Norm(ParameterOp op, Role role, absl::string_view module, int64_t size) {
    rows_.push_back({.role = role, .op = op, .tensors = {{Name(module, ".weight"), {size}}}});
  }

  // The tensors of `weight` are named by their modules.
  void Linear(Parameter weight) {
    for (TensorSpec& tensor : weight.tensors) tensor.name = Name(tensor.name, ".weight");
    rows_.push_back(std::move(weight));
  }

  // The bias of the same modules' outputs. Each rank of a row-parallel layer has the whole bias.
  void Bias(Role role, const Parameter& weight) {
    Parameter bias = {.role = role, .op = ParameterOp::kBias, .packed = DType::kF32};
    if (weight.cut == Cut::kColumnParallel) {
      bias.cut = weight.cut;
      bias.units = weight.units;
    }
    for (const TensorSpec& tensor : weight.tensors) {
      bias.tensors.push_back({Name(tensor.name, ".bias"), {tensor.shape[0]}});
    }
    rows_.push_back(std::move(bias));
  }

  std::vector<Parameter> Take() { return std::move(rows_); }

 private:
  std::string Name(absl::string_view module, absl::string_view kind) const {
    return absl::StrCat(prefix_, module, kind);
  }

  const std::string prefix_;
  std::vector<Parameter> rows_;
};

// One table for Llama, Mistral, Qwen2 and Qwen3: each leaves out some of its rows.
std::vector<Parameter> LayerTable(const ModelConfig& config, int layer) {
  const int64_t hidden = config.hidden_size;
  const int64_t intermediate = config.intermediate_size;
  const int64_t query = int64_t{config.num_heads} * config.head_dim;
  const int64_t kv = int64_t{config.num_kv_heads} * config.head_dim;
  BlockTable table(absl::StrCat("model.layers.", layer, "."));
  table.Norm(ParameterOp::kNorm, Role::kInputNorm, "input_layernorm", hidden);
  const Parameter qkv = {.role = Role::kQkv,
                         .tensors = {{"self_attn.q_proj", {query, hidden}},
                                     {"self_attn.k_proj", {kv, hidden}},
                                     {"self_attn.v_proj", {kv, hidden}}},
                         .cut = Cut::kColumnParallel,
                         .units = config.num_kv_heads};
  table.Linear(qkv);
  if (config.qkv_bias) table.Bias(Role::kQkvBias, qkv);
  if (config.qk_norm) {
    table.Norm(ParameterOp::kHeadNorm, Role::kQNorm, "self_attn.q_norm", config.head_dim);
    table.Norm(ParameterOp::kHeadNorm, Role::kKNorm, "self_attn.k_norm", config.head_dim);
  }
  const Parameter o = {.role = Role::kO,
                       .tensors = {{"self_attn.o_proj", {hidden, query}}},
                       .cut = Cut::kRowParallel,
                       .units = config.num_kv_heads};
  table.Linear(o);
  if (config.o_bias) table.Bias(Role::kOBias, o);
  table.Norm(ParameterOp::kNorm, Role::kPostNorm, "post_attention_layernorm", hidden);
  const Parameter gate_up = {.role = Role::kGateUp,
                             .tensors = {{"mlp.gate_proj", {intermediate, hidden}},
                                         {"mlp.up_proj", {intermediate, hidden}}},
                             .cut = Cut::kColumnParallel,
                             .gated = true};
  table.Linear(gate_up);
  if (config.mlp_bias) table.Bias(Role::kGateUpBias, gate_up);
  const Parameter down = {.role = Role::kDown,
                          .tensors = {{"mlp.down_proj", {hidden, intermediate}}},
                          .cut = Cut::kRowParallel};
  table.Linear(down);
  if (config.mlp_bias) table.Bias(Role::kDownBias, down);
  return table.Take();
}

}  // namespace

ModelPlan Describe(const ModelConfig& config) {
  const int64_t vocab = config.vocab_size;
  const int64_t hidden = config.hidden_size;
  const bool tied = config.tie_word_embeddings;
  ModelPlan plan;
  plan.config = config;
  plan.blocks.push_back({{.role = Role::kEmbedding,
                          .op = ParameterOp::kEmbedding,
                          .tensors = {{kEmbeddingName, {vocab, hidden}}}}});
  for (int layer = 0; layer < config.num_layers; ++layer) {
    plan.blocks.push_back(LayerTable(config, layer));
  }
  plan.blocks.push_back({{.role = Role::kFinalNorm,
                          .op = ParameterOp::kNorm,
                          .tensors = {{"model.norm.weight", {hidden}}}},
                         {.role = Role::kHead,
                          .op = ParameterOp::kLinear,
                          .tensors = {{tied ? kEmbeddingName : kHeadName, {vocab, hidden}}},
                          .cut = Cut::kColumnParallel}});
  if (tied) plan.tied.push_back({.name = kHeadName, .same_as = kEmbeddingName});
  return plan;
}

const Parameter* FindParameter(const std::vector<Parameter>& block, Role role) {
  const auto found = std::find_if(block.begin(), block.end(),
                                  [role](const Parameter& p) { return p.role == role; });
  return found == block.end() ? nullptr : &*found;
}

size_t TensorSpec::NumElements() const {
  size_t count = 1;
  for (const int64_t size : shape) count *= static_cast<size_t>(size);
  return count;
}

std::vector<ExpectedTensor> ExpectedTensors(const ModelPlan& plan) {
  std::vector<ExpectedTensor> specs;
  std::set<absl::string_view> seen;
  for (const std::vector<Parameter>& block : plan.blocks) {
    for (const Parameter& parameter : block) {
      for (const TensorSpec& tensor : parameter.tensors) {
        if (!seen.insert(tensor.name).second) continue;
        specs.push_back({tensor, parameter.role, parameter.op});
      }
    }
  }
  return specs;
}

uint64_t NumParameters(const ModelPlan& plan) {
  uint64_t count = 0;
  for (const TensorSpec& spec : ExpectedTensors(plan)) count += spec.NumElements();
  return count;
}

}  // namespace isobit
