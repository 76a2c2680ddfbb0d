// Chooses the ops of a mode. See cuda_ops.h.
#include "kernels/cuda/cuda_ops.h"

#include <utility>

#include "common/base/status_macros.h"
#include "kernels/cuda/contrast_cuda_ops.h"
#include "kernels/cuda/linear/layout.h"
#include "kernels/cuda/tree_cuda_ops.h"
#include "kernels/plain_weight_packer.h"

namespace isobit {
namespace {

class Packer final : public WeightPacker {
 public:
  size_t PackedBytes(const LinearShape& shape) const override {
    return cuda::PackedLinearBytes(shape);
  }
  void Pack(const LinearShape& shape, const Bf16* w, int64_t ldw,
            std::byte* packed) const override {
    cuda::PackLinear(shape, w, ldw, packed);
  }
};

}  // namespace

const WeightPacker& CudaWeightPacker(NumericsMode mode) {
  static const Packer packer;
  static const PlainWeightPacker for_cublas;
  if (mode == NumericsMode::kVanilla) return for_cublas;
  return packer;
}

absl::StatusOr<std::unique_ptr<CudaOps>> MakeCudaOps(const CudaOptions& options) {
  ISOBIT_ASSIGN_OR_RETURN(std::unique_ptr<CudaDevice> device,
                          CudaDevice::Create(options.device, options.stream));
  switch (options.mode) {
    case NumericsMode::kTree:
      break;
    case NumericsMode::kBatchInvariant:
      return std::make_unique<BatchInvariantCudaOps>(std::move(device));
    case NumericsMode::kVanilla:
      return VanillaCudaOps::Create(std::move(device));
  }
  return std::make_unique<TreeCudaOps>(std::move(device));
}

}  // namespace isobit
