// Chooses the ops of a mode. See cpu_ops.h.
#include "kernels/cpu/cpu_ops.h"

#include "common/base/check.h"
#include "kernels/cpu/contrast_ops.h"
#include "kernels/cpu/linear.h"
#include "kernels/cpu/tree_ops.h"

namespace isobit {
namespace {

class Packer final : public WeightPacker {
 public:
  size_t PackedBytes(const LinearShape& shape) const override {
    return cpu::PackedLayout(shape).bytes;
  }
  void Pack(const LinearShape& shape, const Bf16* w, int64_t ldw,
            std::byte* packed) const override {
    cpu::PackLinear(shape, w, ldw, packed);
  }
};

}  // namespace

const WeightPacker& CpuWeightPacker() {
  static const Packer packer;
  return packer;
}

std::unique_ptr<Ops> MakeCpuOps(const CpuOptions& options) {
  ISOBIT_CHECK(options.isa <= cpu::DetectIsa())
      << "instruction set " << cpu::IsaName(options.isa) << ", this machine runs "
      << cpu::IsaName(cpu::DetectIsa());
  switch (options.mode) {
    case NumericsMode::kTree:
      break;
    case NumericsMode::kBatchInvariant:
      return std::make_unique<cpu::BatchInvariantOps>(options);
    case NumericsMode::kVanilla:
      return std::make_unique<cpu::VanillaOps>(options);
  }
  return std::make_unique<cpu::TreeOps>(options);
}

}  // namespace isobit
