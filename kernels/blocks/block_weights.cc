// Finds a parameter's entry.
#include "kernels/blocks/block_weights.h"

#include "common/base/check.h"

namespace isobit {

const BlockLayout::Entry* BlockWeights::Find(ParameterIndex index) const {
  return index == kNoParameter ? nullptr : &layout_->entries[static_cast<size_t>(index)];
}

LinearWeight BlockWeights::linear(ParameterIndex index) const {
  const BlockLayout::Entry* entry = Find(index);
  if (entry == nullptr) return {};
  return {entry->linear, block_ == nullptr ? nullptr : block_ + entry->offset};
}

const Bf16* BlockWeights::bf16(ParameterIndex index) const {
  const BlockLayout::Entry* entry = Find(index);
  if (entry == nullptr) return nullptr;
  ISOBIT_CHECK(entry->packed == DType::kBf16) << "parameter " << index;
  return reinterpret_cast<const Bf16*>(block_ + entry->offset);
}

const float* BlockWeights::fp32(ParameterIndex index) const {
  const BlockLayout::Entry* entry = Find(index);
  if (entry == nullptr) return nullptr;
  ISOBIT_CHECK(entry->packed == DType::kF32) << "parameter " << index;
  return reinterpret_cast<const float*>(block_ + entry->offset);
}

}  // namespace isobit
