// Compares tensors by their bit patterns.
#ifndef ISOBIT_TESTS_TRAINER_BRIDGE_FRONT_SAME_BITS_H_
#define ISOBIT_TESTS_TRAINER_BRIDGE_FRONT_SAME_BITS_H_

#include <torch/torch.h>

namespace isobit::front {

// Whether both have the same shape, dtype (bf16 or fp32) and bits.
inline bool SameBits(const torch::Tensor& a, const torch::Tensor& b) {
  if (!a.defined() || !b.defined() || a.sizes() != b.sizes() || a.dtype() != b.dtype()) {
    return false;
  }
  const auto type = a.dtype() == torch::kBFloat16 ? torch::kInt16 : torch::kInt32;
  return torch::equal(a.contiguous().view(type), b.contiguous().view(type));
}

}  // namespace isobit::front

#endif  // ISOBIT_TESTS_TRAINER_BRIDGE_FRONT_SAME_BITS_H_
