// The rows of a table, and what is counted over all of them.
#include "common/checkpoint/tensor_plan.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace isobit {

std::string ParameterTable::NameOf(absl::string_view module, absl::string_view kind) const {
  return absl::StrCat(prefix_, module, kind);
}

ParameterIndex ParameterTable::Add(Parameter row) {
  rows_.push_back(std::move(row));
  return static_cast<ParameterIndex>(rows_.size()) - 1;
}

ParameterIndex ParameterTable::Embedding(std::string name, absl::string_view module,
                                         std::vector<int64_t> shape) {
  return Add({.name = std::move(name),
              .op = ParameterOp::kEmbedding,
              .tensors = {{NameOf(module, ".weight"), std::move(shape)}}});
}

ParameterIndex ParameterTable::Norm(std::string name, absl::string_view module, int64_t size) {
  return Add({.name = std::move(name),
              .op = ParameterOp::kNorm,
              .tensors = {{NameOf(module, ".weight"), {size}}}});
}

ParameterIndex ParameterTable::HeadNorm(std::string name, absl::string_view module, int64_t size,
                                        bool exists) {
  if (!exists) return kNoParameter;
  return Add({.name = std::move(name),
              .op = ParameterOp::kHeadNorm,
              .tensors = {{NameOf(module, ".weight"), {size}}}});
}

ParameterIndex ParameterTable::Linear(Parameter weight) {
  for (TensorSpec& tensor : weight.tensors) tensor.name = NameOf(tensor.name, ".weight");
  return Add(std::move(weight));
}

ParameterIndex ParameterTable::Bias(ParameterIndex weight, bool exists) {
  if (!exists) return kNoParameter;
  const Parameter& of = rows_[static_cast<size_t>(weight)];
  Parameter bias = {.name = of.name + "_bias", .op = ParameterOp::kBias, .packed = DType::kF32};
  if (of.cut == Cut::kColumnParallel) {
    bias.cut = of.cut;
    bias.units = of.units;
  }
  for (const TensorSpec& tensor : of.tensors) {
    const absl::string_view module = absl::StripSuffix(tensor.name, ".weight");
    bias.tensors.push_back({absl::StrCat(module, ".bias"), {tensor.shape[0]}});
  }
  return Add(std::move(bias));
}

const Parameter* FindParameter(const std::vector<Parameter>& block, absl::string_view name) {
  const auto found = std::find_if(block.begin(), block.end(),
                                  [name](const Parameter& p) { return p.name == name; });
  return found == block.end() ? nullptr : &*found;
}

size_t TensorSpec::NumElements() const {
  size_t count = 1;
  for (const int64_t size : shape) count *= static_cast<size_t>(size);
  return count;
}

std::vector<ExpectedTensor> ExpectedTensors(const TensorPlan& plan) {
  std::vector<ExpectedTensor> specs;
  std::set<absl::string_view> seen;
  for (const std::vector<Parameter>& block : plan.parameters) {
    for (const Parameter& parameter : block) {
      for (const TensorSpec& tensor : parameter.tensors) {
        if (!seen.insert(tensor.name).second) continue;
        specs.push_back({tensor, parameter.op});
      }
    }
  }
  return specs;
}

uint64_t NumParameters(const TensorPlan& plan) {
  uint64_t count = 0;
  for (const TensorSpec& spec : ExpectedTensors(plan)) count += spec.NumElements();
  return count;
}

}  // namespace isobit
