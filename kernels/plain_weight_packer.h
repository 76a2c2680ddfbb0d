// Weights in the checkpoint's order, row after
// row: for backends without a layout of their own.
#ifndef ISOBIT_KERNELS_PLAIN_WEIGHT_PACKER_H_
#define ISOBIT_KERNELS_PLAIN_WEIGHT_PACKER_H_

#include <algorithm>

#include "kernels/weight_packer.h"

namespace isobit {

// Packs to [n, k] bf16, row-major, without gaps.
class PlainWeightPacker final : public WeightPacker {
 public:
  bool keeps_rows() const override { return true; }
  size_t PackedBytes(const LinearShape& shape) const override {
    return static_cast<size_t>(shape.n * shape.k) * sizeof(Bf16);
  }
  void Pack(const LinearShape& shape, const Bf16* w, int64_t ldw,
            std::byte* packed) const override {
    Bf16* to = reinterpret_cast<Bf16*>(packed);
    for (int64_t row = 0; row < shape.n; ++row)
      std::copy_n(w + row * ldw, shape.k, to + row * shape.k);
  }
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_PLAIN_WEIGHT_PACKER_H_
