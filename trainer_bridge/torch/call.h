// One call of an op: checks its tensors, allocates its results, and runs a kernel on their device.
// Errors are exceptions, which Python sees as RuntimeError.
#ifndef ISOBIT_TRAINER_BRIDGE_TORCH_CALL_H_
#define ISOBIT_TRAINER_BRIDGE_TORCH_CALL_H_

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/contract/portable.h"
#include "kernels/ops/losses.h"
#include "kernels/ops/op_table.h"
#include "kernels/ops/packs.h"
#include "trainer_bridge/torch/backend.h"
#include "trainer_bridge/torch/float_environment.h"

namespace isobit::bridge {

using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;
using Shape = std::vector<int64_t>;
using Bounds = std::vector<int64_t>;

// PyTorch's dtype for an element type of the kernels.
template <typename T>
constexpr torch::headeronly::ScalarType DtypeOf() {
  using torch::headeronly::ScalarType;
  if constexpr (std::is_same_v<T, Bf16>) return ScalarType::BFloat16;
  if constexpr (std::is_same_v<T, float>) return ScalarType::Float;
  if constexpr (std::is_same_v<T, double>) return ScalarType::Double;
  if constexpr (std::is_same_v<T, int32_t>) return ScalarType::Int;
  if constexpr (std::is_same_v<T, int64_t>) return ScalarType::Long;
}

class Call {
 public:
  // The op called `op` runs on the device of `first`, which must outlive this object.
  Call(const char* op, const Tensor& first) : op_(op), first_(first) {}

  // The rows and columns of a matrix.
  std::pair<int64_t, int64_t> MatrixShape(const char* name, const Tensor& t) const;
  int64_t Length(const char* name, const Tensor& t) const;

  // A contiguous tensor of dtype T and this shape on the op's device.
  template <typename T>
  const T* In(const char* name, const Tensor& t, const Shape& shape) const {
    Check(name, t, DtypeOf<T>(), shape);
    return static_cast<const T*>(t.const_data_ptr());
  }
  template <typename T>
  const T* In(const char* name, const MaybeTensor& t, const Shape& shape) const {
    return t ? In<T>(name, *t, shape) : nullptr;
  }
  template <typename T>
  T* InOut(const char* name, const Tensor& t, const Shape& shape) const {
    Check(name, t, DtypeOf<T>(), shape);
    return static_cast<T*>(t.mutable_data_ptr());
  }
  // Fails unless int32 values in host memory are in [0, bound). The caller must check values in GPU
  // memory: reading them here would wait for the GPU.
  void CheckRange(const char* name, const Tensor& t, int64_t bound) const;
  // Fails unless holds(value) for every value in host memory. GPU memory: as for CheckRange.
  template <typename T>
  void CheckEach(const char* name, const MaybeTensor& t, const char* expected,
                 bool (*holds)(T)) const {
    if (!t || !t->is_cpu()) return;
    const auto* values = static_cast<const T*>(t->const_data_ptr());
    for (int64_t i = 0; i < t->numel(); ++i) {
      if (!holds(values[i])) Require(false, name, expected, absl::StrCat(values[i], " at ", i));
    }
  }
  // Fails unless int32 values in host memory ascend from 0 to `rows`. GPU memory: as CheckRange.
  void CheckBounds(const char* name, const Tensor& t, int64_t rows) const;
  // Fails unless these are the bounds of packs that cover `rows` rows.
  PackBounds Packs(const Bounds& bounds, int64_t rows) const;

  // A new, uninitialised tensor on the op's device; data, if set, receives its address.
  template <typename T>
  Tensor New(const Shape& shape, T** data) const {
    Tensor t = Empty(DtypeOf<T>(), shape);
    *data = static_cast<T*>(t.mutable_data_ptr());
    return t;
  }
  template <typename T>
  Tensor NewZeros(const Shape& shape, T** data) const {
    Tensor t = New<T>(shape, data);
    return Zeroed(std::move(t));
  }

  template <typename Args>
  void Run(const Args& args) const {
    Finish(WithBackend(first_, [&](const OpTable& ops) { return ops.Run(args); }));
  }

  // Fails unless `holds`; the message shows `expected` and `got`.
  void Require(bool holds, const char* name, const std::string& expected,
               const std::string& got) const;

 private:
  void Check(const char* name, const Tensor& t, torch::headeronly::ScalarType dtype,
             const Shape& shape) const;
  Tensor Empty(torch::headeronly::ScalarType dtype, const Shape& shape) const;
  static Tensor Zeroed(Tensor t);
  void Finish(const absl::Status& status) const;

  const FloatEnvironment environment_;  // set while the op runs and while arguments are converted
  const char* op_;
  const Tensor& first_;
};

}  // namespace isobit::bridge

#endif  // ISOBIT_TRAINER_BRIDGE_TORCH_CALL_H_
