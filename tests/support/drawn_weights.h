// Random weights of any plan, as a source that has all of them from the start.
#ifndef ISOBIT_TESTS_SUPPORT_DRAWN_WEIGHTS_H_
#define ISOBIT_TESTS_SUPPORT_DRAWN_WEIGHTS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/checkpoint/tensor_plan.h"
#include "common/checkpoint/tensor_source.h"
#include "kernels/contract/portable.h"
#include "kernels/model/random_weights.h"

namespace isobit::testing_support {

class DrawnWeights : public TensorSource {
 public:
  // Without the tensor `absent`.
  explicit DrawnWeights(const TensorPlan& plan, const std::string& absent = "") {
    std::vector<ExpectedTensor> specs = ExpectedTensors(plan);
    std::ranges::sort(specs, {}, &ExpectedTensor::name);
    for (const ExpectedTensor& spec : specs) {
      if (spec.name == absent) continue;
      tensors_.push_back({.name = spec.name,
                          .shape = spec.shape,
                          .size_bytes = spec.NumElements() * sizeof(Bf16)});
      drawn_.emplace_back(spec, /*seed=*/3);
    }
  }

  absl::Status Read(size_t tensor, size_t first, size_t size, uint8_t* out) const override {
    drawn_[tensor].Draw(first / sizeof(Bf16), size / sizeof(Bf16), reinterpret_cast<Bf16*>(out));
    return absl::OkStatus();
  }

  std::vector<Bf16> Values(const std::string& name) const {
    const auto tensor = static_cast<size_t>(Find(name) - tensors_.data());
    std::vector<Bf16> values(tensors_[tensor].NumElements());
    drawn_[tensor].Draw(0, values.size(), values.data());
    return values;
  }

 private:
  std::vector<RandomTensor> drawn_;  // [tensor]
};

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_SUPPORT_DRAWN_WEIGHTS_H_
