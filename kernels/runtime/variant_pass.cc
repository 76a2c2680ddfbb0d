// Makes the pass and its copies of the weights.
#include "kernels/runtime/variant_pass.h"

#include <cstddef>
#include <utility>

#include "common/base/status_macros.h"
#include "common/checkpoint/tensor_plan.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/sm90/weights/weight_kernels.h"

namespace isobit {

absl::StatusOr<std::unique_ptr<VariantPass>> VariantPass::Create(const RankOptions& options,
                                                                 const CudaRankGroup& group,
                                                                 CudaBackend& ops,
                                                                 const WeightLayout& layout) {
  RankOptions other = options;
  other.mode = kVariantMode;
  ISOBIT_ASSIGN_OR_RETURN(
      auto variant_ops, CudaBackend::Create({.mode = kVariantMode, .resources = ops.resources()}));
  ISOBIT_ASSIGN_OR_RETURN(auto all_reduce, group.MakeAllReduce(other, *variant_ops));
  return std::unique_ptr<VariantPass>(
      new VariantPass(options, layout, std::move(variant_ops), std::move(all_reduce)));
}

VariantPass::VariantPass(const RankOptions& options, const WeightLayout& layout,
                         std::unique_ptr<CudaBackend> ops, std::unique_ptr<AllReduce> all_reduce)
    : packed_layout_(layout),
      ops_(std::move(ops)),
      layout_(WeightLayout::WithCopies(layout, ops_->packer())),
      all_reduce_(std::move(all_reduce)),
      transformer_(layout_, options.rope, *ops_, all_reduce_.get()) {}

absl::Status VariantPass::Reserve(int64_t rows, const Transformer& other) {
  // What the product before SwiGLU takes.
  const auto elements = static_cast<size_t>(rows * layout_.WidestGated());
  ISOBIT_RETURN_IF_ERROR(ops_->resources()->Scratch(elements * sizeof(Bf16)).status());
  transformer_.ShareMemory(other);
  return transformer_.Reserve(rows);
}

absl::Status VariantPass::CopyWeights(WeightSource& weights) {
  CudaDevice& device = ops_->device();
  ISOBIT_RETURN_IF_ERROR(device.Enter());
  for (int block = 0; block < layout_.num_blocks(); ++block) {
    ISOBIT_ASSIGN_OR_RETURN(const HeldBlock held, HeldBlock::Acquire(weights, block));
    const BlockWeights packed = packed_layout_.Bind(block, held.bytes());
    const BlockWeights copies = layout_.Bind(block, held.bytes());
    const auto& parameters = layout_.plan().parameters[static_cast<size_t>(block)];
    for (ParameterIndex i = 0; i < static_cast<ParameterIndex>(parameters.size()); ++i) {
      if (parameters[static_cast<size_t>(i)].op != ParameterOp::kLinear) continue;
      const std::byte* const copy = copies.linear(i).packed;
      ISOBIT_RETURN_IF_ERROR(cuda::UnpackLinearOnDevice(
          packed.linear(i), const_cast<Bf16*>(reinterpret_cast<const Bf16*>(copy)),
          device.stream()));
    }
  }
  return device.Synchronize();
}

}  // namespace isobit
