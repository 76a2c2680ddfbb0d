// The WeightPacker over layout.h.
#include "kernels/cuda/sm90/linear/packer.h"

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/sm90/linear/layout.h"

namespace isobit::cuda {
namespace {

class Packer final : public WeightPacker {
 public:
  size_t PackedBytes(const LinearShape& shape) const override { return PackedLinearBytes(shape); }
  void Pack(const LinearShape& shape, const Bf16* w, int64_t ldw,
            std::byte* packed) const override {
    PackLinear(shape, w, ldw, packed);
  }
};

}  // namespace

const WeightPacker& LinearPacker() {
  static const Packer packer;
  return packer;
}

}  // namespace isobit::cuda
