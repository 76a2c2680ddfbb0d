// A block's parameters in memory: where each lies among the block's bytes, and access by its index.
#ifndef ISOBIT_KERNELS_BLOCKS_BLOCK_WEIGHTS_H_
#define ISOBIT_KERNELS_BLOCKS_BLOCK_WEIGHTS_H_

#include <cstddef>
#include <vector>

#include "common/checkpoint/dtype.h"
#include "common/checkpoint/tensor_plan.h"
#include "kernels/contract/portable.h"
#include "kernels/ops/linear_shape.h"

namespace isobit {

// Where a block's parameters are, in the order of the plan.
struct BlockLayout {
  struct Entry {
    DType packed;
    size_t offset;            // bytes from the block's begin
    LinearShape linear = {};  // only of a linear layer
  };
  std::vector<Entry> entries;
  size_t bytes = 0;
};

// A block's parameters by their index. For kNoParameter the result is a null pointer, or a weight
// with a null pointer.
class BlockWeights {
 public:
  // Both outlive the object. block: null if only shapes are needed.
  BlockWeights(const BlockLayout& layout, const std::byte* block)
      : layout_(&layout), block_(block) {}

  LinearWeight linear(ParameterIndex index) const;
  const Bf16* bf16(ParameterIndex index) const;   // the embedding [vocab, hidden], or a norm
  const float* fp32(ParameterIndex index) const;  // a bias: one number for each output of this rank

 private:
  const BlockLayout::Entry* Find(ParameterIndex index) const;

  const BlockLayout* layout_;
  const std::byte* block_;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_BLOCKS_BLOCK_WEIGHTS_H_
