// The comparison of a checkpoint with a plan. See validate_tensors.h.
#include "common/checkpoint/validate_tensors.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/checkpoint/strict_json.h"  // Quoted
#include "common/checkpoint/tensor_names.h"

namespace isobit {
namespace {

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

absl::Status ValidateTensors(const TensorPlan& plan, const TensorSource& source) {
  std::vector<std::string> missing, unexpected, misshapen;
  std::set<std::string> known;
  for (const TensorSpec& spec : ExpectedTensors(plan)) {
    known.insert(spec.name);
    const Tensor* tensor = source.Find(spec.name);
    if (tensor == nullptr) {
      missing.push_back(spec.name);
    } else if (tensor->shape != spec.shape) {
      misshapen.push_back(absl::StrCat(spec.name, " is ", ShapeString(tensor->shape), ", expected ",
                                       ShapeString(spec.shape)));
    }
  }
  for (const TiedTensor& tied : plan.tied) known.insert(tied.name);
  for (const Tensor& tensor : source.tensors()) {
    if (known.count(tensor.name) != 0 || IsRotaryBuffer(tensor.name)) continue;
    unexpected.push_back(Quoted(tensor.name));
  }
  std::string problems;
  AppendProblem("missing tensors", missing, problems);
  AppendProblem("unexpected tensors", unexpected, problems);
  AppendProblem("tensors of another shape", misshapen, problems);
  return problems.empty() ? absl::OkStatus() : absl::InvalidArgumentError(problems);
}

absl::Status CheckTiedTensors(const TensorPlan& plan, const CheckpointDigests& digests) {
  for (const TiedTensor& tied : plan.tied) {
    const auto copy = digests.tensors.find(tied.name);
    if (copy == digests.tensors.end() || copy->second == digests.tensors.at(tied.same_as)) continue;
    return absl::InvalidArgumentError(absl::StrCat("tensor ", tied.name, " differs from ",
                                                   tied.same_as, ", to which config.json ties it"));
  }
  return absl::OkStatus();
}

}  // namespace isobit
