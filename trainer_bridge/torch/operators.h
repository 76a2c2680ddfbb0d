// How an operator is declared. Each *_ops.cc defines operators over tensors: each checks its
// arguments, allocates its results and calls one op of OpTable (several where a comment says so).
// A table at the file's end declares them. python/isobit/torch/functional.py documents them.
#ifndef ISOBIT_TRAINER_BRIDGE_TORCH_OPERATORS_H_
#define ISOBIT_TRAINER_BRIDGE_TORCH_OPERATORS_H_

#include <torch/csrc/stable/library.h>

#include <cstdint>

#include "absl/types/span.h"

namespace isobit::bridge {

struct Operator {
  const char* schema;  // in PyTorch's syntax
  void (*function)(StableIValue* stack, uint64_t num_args, uint64_t num_outputs);  // TORCH_BOX(&F)
  // The result as a Python expression of the arguments; python/isobit/torch/fakes.py says which
  // functions it may call. Fake tensors get their results from it. Operators that take no tensors
  // have none.
  const char* result = "";
};

// The steps of ISOBIT_OPERATORS. Implement: those operators that take tensors, or the others.
void Define(absl::Span<const Operator> operators, torch::stable::detail::StableLibrary& library);
void Implement(absl::Span<const Operator> operators, bool with_tensors,
               torch::stable::detail::StableLibrary& library);

// Registers the operators of an array with PyTorch when the library is loaded. Once per file.
#define ISOBIT_OPERATORS(operators)                                             \
  STABLE_TORCH_LIBRARY_FRAGMENT(isobit, m) { Define(operators, m); }            \
  STABLE_TORCH_LIBRARY_IMPL(isobit, CPU, m) { Implement(operators, true, m); }  \
  STABLE_TORCH_LIBRARY_IMPL(isobit, CUDA, m) { Implement(operators, true, m); } \
  STABLE_TORCH_LIBRARY_IMPL(isobit, CompositeExplicitAutograd, m) {             \
    Implement(operators, false, m);                                             \
  }

}  // namespace isobit::bridge

#endif  // ISOBIT_TRAINER_BRIDGE_TORCH_OPERATORS_H_
