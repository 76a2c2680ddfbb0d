// A rank's weights as blocks of bytes: one for each block of the model's plan.
// A trainer shards and gathers blocks, and an update replaces them. A block's layout is a pure
// function of the model's plan, the rank and the backend.
#ifndef ISOBIT_KERNELS_MODEL_WEIGHTS_H_
#define ISOBIT_KERNELS_MODEL_WEIGHTS_H_

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/model_config.h"
#include "common/checkpoint/weight_reader.h"
#include "kernels/blocks/block_weights.h"
#include "kernels/blocks/rank_shape.h"
#include "kernels/device_packer.h"
#include "kernels/model/model_plan.h"
#include "kernels/weight_packer.h"

namespace isobit {

// A slice of a checkpoint's tensor from which a block is packed.
struct StagedSlice {
  const TensorSpec* tensor;
  Slice slice;
  size_t offset;  // bf16 values from the begin of the copied slices
};

// The layout of a rank's weights. Block 0 is the embedding, block i + 1 is plan().blocks[i], and
// the last one is the head.
class WeightLayout {
 public:
  // packer: that of the backend that reads the blocks; outlives the object.
  WeightLayout(ModelPlan plan, const RankShape& shape, const WeightPacker& packer);

  // The layout of blocks that begin like those of `layout` and then have a second copy of the
  // linear layers, packed by `packer`. It places linear layers in the copy, and everything else
  // where `layout` does.
  static WeightLayout WithCopies(const WeightLayout& layout, const WeightPacker& packer);

  const ModelPlan& plan() const { return plan_; }
  const ModelConfig& config() const { return plan_.config; }
  const RankShape& shape() const { return shape_; }
  int num_blocks() const { return static_cast<int>(blocks_.size()); }
  int head_block() const { return num_blocks() - 1; }
  // The most outputs of a gated linear layer on this rank, which ops may need memory for.
  int64_t WidestGated() const;
  size_t BlockBytes(int block) const { return LayoutOf(block).bytes; }

  // The parameters of a block. bytes: the block's; null if only shapes are needed.
  BlockWeights Bind(int block, const std::byte* bytes) const { return {LayoutOf(block), bytes}; }

  // The names of the tensors from which a block is packed.
  std::vector<std::string> TensorsOf(int block) const;

  // Converts, slices and packs a block from those tensors, whose source ValidateTensors has
  // accepted. `out` has BlockBytes(block) bytes and is 128-byte aligned. Writes zeros to the
  // padding, so that equal weights give equal bytes.
  void PackBlock(const TensorSet& tensors, int block, std::byte* out) const;

  // The same in a device's memory, from slices copied there. StagingOf says which slices of which
  // tensors to copy to which offsets, each without gaps and in bf16, and how many values they take
  // in total; `staged` is aligned to 256 bytes. The specs live as long as this object.
  std::vector<StagedSlice> StagingOf(int block, size_t* num_values) const;
  absl::Status PackStaged(int block, const Bf16* staged, DevicePacker& packer,
                          std::byte* out) const;

 private:
  const BlockLayout& LayoutOf(int block) const { return blocks_[static_cast<size_t>(block)]; }
  const std::vector<Parameter>& ParametersOf(int block) const {
    return plan_.parameters[static_cast<size_t>(block)];
  }

  ModelPlan plan_;
  RankShape shape_;
  const WeightPacker& packer_;
  std::vector<BlockLayout> blocks_;
};

// Gives a forward pass its blocks, each once and in order. Two may be held at the same time. The
// last block, the head, may be acquired again.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  // The block's bytes. Ops launched before
  // Release(block) may read them. May wait for a gather.
  virtual absl::StatusOr<const std::byte*> Acquire(int block) = 0;
  // Call it in the order of the blocks.
  virtual void Release(int block) = 0;
};

// Holds a block until the object is destroyed.
class HeldBlock {
 public:
  static absl::StatusOr<HeldBlock> Acquire(WeightSource& weights, int block) {
    absl::StatusOr<const std::byte*> bytes = weights.Acquire(block);
    if (!bytes.ok()) return bytes.status();
    return HeldBlock(weights, block, *bytes);
  }
  HeldBlock(HeldBlock&& other) noexcept
      : weights_(std::exchange(other.weights_, nullptr)),
        block_(other.block_),
        bytes_(other.bytes_) {}
  HeldBlock& operator=(HeldBlock&& other) noexcept {
    Release();
    weights_ = std::exchange(other.weights_, nullptr);
    block_ = other.block_;
    bytes_ = other.bytes_;
    return *this;
  }
  ~HeldBlock() { Release(); }

  const std::byte* bytes() const { return bytes_; }
  void Release() {
    if (weights_ != nullptr) std::exchange(weights_, nullptr)->Release(block_);
  }

 private:
  HeldBlock(WeightSource& weights, int block, const std::byte* bytes)
      : weights_(&weights), block_(block), bytes_(bytes) {}

  WeightSource* weights_;  // null: released
  int block_;
  const std::byte* bytes_;
};

// 128-byte aligned bytes.
struct AlignedFree {
  void operator()(std::byte* p) const;
};
using AlignedBytes = std::unique_ptr<std::byte[], AlignedFree>;
AlignedBytes AllocateAligned(size_t bytes);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_WEIGHTS_H_
