// Registers operators with PyTorch, and lists their results for Python.
#include "trainer_bridge/torch/operators.h"

#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"

namespace isobit::bridge {
namespace {

std::string NameOf(const Operator& op) {
  const std::string_view schema = op.schema;
  return std::string(schema.substr(0, schema.find('(')));
}

// Without tensors among the arguments there is no device to choose by.
bool TakesTensors(const Operator& op) {
  const std::string_view schema = op.schema;
  return schema.substr(0, schema.find("->")).find("Tensor") != std::string_view::npos;
}

// A line "name: result" for each operator that takes tensors.
std::string& Results() {
  static auto& results = *new std::string;
  return results;
}

std::string OperatorResults() { return Results(); }

constexpr Operator kOperators[] = {{"operator_results() -> str", TORCH_BOX(&OperatorResults)}};

}  // namespace

void Define(absl::Span<const Operator> operators, torch::stable::detail::StableLibrary& library) {
  for (const Operator& op : operators) {
    library.def(op.schema);
    if (TakesTensors(op)) absl::StrAppend(&Results(), NameOf(op), ": ", op.result, "\n");
  }
}

void Implement(absl::Span<const Operator> operators, bool with_tensors,
               torch::stable::detail::StableLibrary& library) {
  for (const Operator& op : operators) {
    if (TakesTensors(op) == with_tensors) library.impl(NameOf(op).c_str(), op.function);
  }
}

ISOBIT_OPERATORS(kOperators)

}  // namespace isobit::bridge
