#include "trainer_bridge/front/decoder.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/base/check.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/dtype.h"
#include "common/checkpoint/model_config.h"
#include "common/checkpoint/safetensors.h"
#include "common/checkpoint/validate_tensors.h"
#include "common/checkpoint/weight_reader.h"
#include "kernels/contract/constants.h"
#include "kernels/model/numerics.h"

namespace isobit::front {
namespace {

// INVARIANT: named_parameters() has the order of the Hugging Face model's, in which a norm adds up
// (C15). DecoderTest.HasPythonsBits. A layer's blocks come first, each with its products and then
// the norms of its heads; their own norms are the last of the layer.
std::vector<TensorSpec> HuggingFaceOrder(const ModelPlan& plan) {
  std::map<std::string, TensorSpec> left;
  std::vector<TensorSpec> order;
  for (const ExpectedTensor& spec : ExpectedTensors(plan)) left.emplace(spec.name, spec);
  const auto take = [&](const std::string& name) {
    if (auto found = left.extract(name)) order.push_back(std::move(found.mapped()));
  };
  const auto take_all = [&](size_t block, ParameterOp op) {
    for (const Parameter& parameter : plan.parameters[block]) {
      if (parameter.op != op) continue;
      for (const TensorSpec& tensor : parameter.tensors) {
        take(tensor.name);
        take(absl::StrCat(absl::StripSuffix(tensor.name, ".weight"), ".bias"));
      }
    }
  };
  take_all(0, ParameterOp::kEmbedding);
  for (size_t begin = 0, end = 0; begin < plan.blocks.size(); begin = end) {
    const int layer = plan.blocks[begin]->layer();
    for (; end < plan.blocks.size() && plan.blocks[end]->layer() == layer; ++end) {
      take_all(end + 1, ParameterOp::kLinear);
      take_all(end + 1, ParameterOp::kHeadNorm);
    }
    for (size_t b = begin; b < end; ++b) take_all(b + 1, ParameterOp::kNorm);
  }
  take_all(plan.parameters.size() - 1, ParameterOp::kNorm);
  take_all(plan.parameters.size() - 1, ParameterOp::kLinear);
  ISOBIT_CHECK(left.empty()) << left.begin()->first;
  return order;
}

// A module without a forward pass: a part of a parameter's name.
class Part : public torch::nn::Module {};

// The module named `name` inside `parent`, which is made if it is not there.
torch::nn::Module& ChildOf(torch::nn::Module& parent, const std::string& name) {
  const auto children = parent.named_children();
  if (const auto* child = children.find(name)) return **child;
  return *parent.register_module(name, std::make_shared<Part>());
}

// Registers a parameter such as model.layers.0.mlp.up_proj.weight.
torch::Tensor Register(torch::nn::Module& root, const std::string& name, torch::Tensor tensor) {
  const std::vector<std::string> path = absl::StrSplit(name, '.');
  torch::nn::Module* module = &root;
  for (size_t i = 0; i + 1 < path.size(); ++i) module = &ChildOf(*module, path[i]);
  torch::Tensor parameter = module->register_parameter(path.back(), std::move(tensor));
  KeepFp32Gradient(parameter);
  return parameter;
}

absl::StatusOr<torch::Tensor> ReadTensor(WeightReader& reader, const TensorSpec& spec) {
  TensorSet read;
  ISOBIT_RETURN_IF_ERROR(reader.Read({spec.name}, /*max_workers=*/1, read));
  const isobit::Tensor* stored = read.Find(spec.name);
  torch::Tensor tensor = torch::empty(spec.shape, torch::kBFloat16);
  ConvertToBf16(stored->dtype, stored->data, spec.NumElements(),
                static_cast<uint16_t*>(tensor.data_ptr()));
  if (torch::isfinite(tensor).all().item<bool>()) return tensor;
  return absl::InvalidArgumentError(absl::StrCat(
      "tensor ", spec.name, " holds a NaN or an infinity in bf16, expected finite weights"));
}

torch::Tensor TableOf(const std::vector<float>& values, int64_t positions) {
  return torch::tensor(values).view({positions, -1});
}

}  // namespace

Decoder::Decoder(const ModelConfig& config) : plan_(config) {}

absl::StatusOr<std::shared_ptr<Decoder>> Decoder::Load(const std::string& directory) {
  ISOBIT_ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(directory));
  ISOBIT_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(directory));
  std::shared_ptr<Decoder> decoder(new Decoder(config));
  ISOBIT_RETURN_IF_ERROR(ValidateTensors(decoder->plan_, checkpoint));
  WeightReader reader(checkpoint, /*allow_nonfinite=*/true);  // ReadTensor judges what is trained
  for (const TensorSpec& spec : HuggingFaceOrder(decoder->plan_)) {
    ISOBIT_ASSIGN_OR_RETURN(torch::Tensor tensor, ReadTensor(reader, spec));
    decoder->parameters_[spec.name] = Register(*decoder, spec.name, std::move(tensor));
  }
  ISOBIT_ASSIGN_OR_RETURN(const CheckpointDigests digests, reader.Finish());
  ISOBIT_RETURN_IF_ERROR(CheckTiedTensors(decoder->plan_, digests));
  return decoder;
}

std::vector<torch::Tensor> Decoder::Weights(size_t block, ParameterIndex index) const {
  std::vector<torch::Tensor> weights;
  if (index == kNoParameter) return weights;
  for (const TensorSpec& spec : plan_.parameters[block][static_cast<size_t>(index)].tensors) {
    weights.push_back(parameters_.at(spec.name));
  }
  return weights;
}
torch::Tensor Decoder::Weight(size_t block, ParameterIndex index) const {
  return Weights(block, index)[0];
}
std::optional<torch::Tensor> Decoder::MaybeWeight(size_t block, ParameterIndex index) const {
  return index == kNoParameter ? std::nullopt : std::optional(Weight(block, index));
}

void Decoder::GrowTable(int64_t positions) {
  const torch::Device device = parameters_.begin()->second.device();
  if (cosine_.defined() && cosine_.size(0) >= positions && cosine_.device() == device) return;
  int64_t size = 1;
  while (size < positions) size *= 2;
  size = std::min<int64_t>(size, config().max_position_embeddings);
  const contract::RopeTable table = RopeTableOf(config(), size);
  cosine_ = TableOf(table.cosine, size).to(device);
  sine_ = TableOf(table.sine, size).to(device);
}

torch::Tensor Decoder::Forward(const isobit::Attention& block, size_t number,
                               const torch::Tensor& hidden, const TrainingBatch& batch) const {
  const ModelConfig& c = config();
  const Bounds& packs = batch.packs;
  const HeadShape shape = {c.num_heads, c.num_kv_heads, c.head_dim, c.rms_norm_eps};
  torch::Tensor h = RmsNorm(hidden, Weight(number, block.norm()), c.rms_norm_eps, packs);
  h = Linear(h, Weights(number, block.qkv()), Weights(number, block.qkv_bias()), packs);
  const auto [q, k, v] = Qkv(h, batch, cosine_, sine_, MaybeWeight(number, block.q_norm()),
                             MaybeWeight(number, block.k_norm()), shape);
  h = Attention(q, k, v, batch, c.head_dim, block.window());
  return LinearAdd(h, Weight(number, block.o()), MaybeWeight(number, block.o_bias()), hidden,
                   c.num_heads / c.num_kv_heads * c.head_dim, packs);
}

torch::Tensor Decoder::Forward(const GatedMlp& block, size_t number, const torch::Tensor& hidden,
                               const TrainingBatch& batch) const {
  const Bounds& packs = batch.packs;
  torch::Tensor h = RmsNorm(hidden, Weight(number, block.norm()), config().rms_norm_eps, packs);
  h = Linear(h, Weights(number, block.gate_up()), Weights(number, block.gate_up_bias()), packs);
  return LinearAdd(SwiGlu(h), Weight(number, block.down()), MaybeWeight(number, block.down_bias()),
                   hidden, contract::kLeafUnit, packs);
}

absl::StatusOr<Scores> Decoder::Score(const TrainingBatch& batch) {
  const ModelConfig& c = config();
  if (batch.max_length > c.max_position_embeddings) {
    return absl::InvalidArgumentError(absl::StrCat("a sequence has ", batch.max_length,
                                                   " tokens; the model takes ",
                                                   c.max_position_embeddings));
  }
  if (batch.max_id >= c.vocab_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected tokens below ", c.vocab_size, ", got ", batch.max_id));
  }
  GrowTable(batch.max_length);
  const auto tied = c.tie_word_embeddings ? c10::make_intrusive<TiedGradient>() : TiedGradientPtr();
  torch::Tensor hidden = Embedding(batch, Weight(0, plan_.embedding->table()), tied);
  for (size_t b = 0; b < plan_.blocks.size(); ++b) {
    const Block* const block = plan_.blocks[b].get();
    if (const auto* const attention = dynamic_cast<const isobit::Attention*>(block)) {
      hidden = Forward(*attention, b + 1, hidden, batch);
    } else if (const auto* const mlp = dynamic_cast<const GatedMlp*>(block)) {
      hidden = Forward(*mlp, b + 1, hidden, batch);
    } else {
      return absl::UnimplementedError(absl::StrCat("no training pass for ", block->kind()));
    }
  }
  const size_t head = plan_.parameters.size() - 1;
  hidden = RmsNorm(hidden, Weight(head, plan_.head->norm()), c.rms_norm_eps, batch.packs);
  auto [logprobs, entropies] = LogProbs(hidden.index_select(0, batch.scored),
                                        Weight(head, plan_.head->linear()), batch, tied);
  return Scores{logprobs, entropies};
}

absl::Status Decoder::Save(const std::string& directory) const {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) {
    return absl::InvalidArgumentError(absl::StrCat(directory, ": ", error.message()));
  }
  std::vector<isobit::Tensor> tensors;
  std::vector<torch::Tensor> held;
  for (const auto& [name, parameter] : parameters_) {
    held.push_back(parameter.detach().cpu().contiguous());
    isobit::Tensor tensor;
    tensor.name = name;
    tensor.dtype = DType::kBf16;
    tensor.shape = parameter.sizes().vec();
    tensor.data = static_cast<const uint8_t*>(held.back().data_ptr());
    tensor.size_bytes = held.back().nbytes();
    tensors.push_back(std::move(tensor));
  }
  if (auto status = WriteSafetensors(directory + "/model.safetensors", std::move(tensors));
      !status.ok()) {
    return status;
  }
  return WriteConfigJson(config(), directory);
}

}  // namespace isobit::front
