// The memory in which a rank's blocks keep what they need of a sequence's past (Block::State):
// pages of tokens, and slots. Not here: which of them belong to which sequence.
#ifndef ISOBIT_KERNELS_MODEL_KV_CACHE_H_
#define ISOBIT_KERNELS_MODEL_KV_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/blocks/block.h"
#include "kernels/blocks/rank_shape.h"
#include "kernels/device.h"
#include "kernels/model/model_plan.h"
#include "kernels/ops/paged_kv.h"

namespace isobit {

// What slots a model needs.
struct SlotSpec {
  size_t bytes = 0;  // of one slot over all blocks; 0: the model has no slots
  int32_t rows = 0;  // StateSpec::slot_rows that holds for all blocks
};
SlotSpec SlotsOf(const ModelPlan& plan, const RankShape& shape);

struct CacheSize {
  int32_t num_pages = 0;
  int32_t page_size = 0;  // tokens
  int32_t num_slots = 0;  // besides kCutSlot; without effect if the model has no slots
  // All blocks use the memory of one, for a pass that computes whole sequences and keeps nothing.
  bool shared = false;

  bool operator==(const CacheSize&) const = default;
};

// One rank's pages and slots. A page number means the same page in every block, and likewise the
// number of a slot. Slots are numbered from 1, because of kCutSlot.
class KvCache {
 public:
  // RESOURCE_EXHAUSTED: the cache does not fit into the backend's memory.
  static absl::StatusOr<KvCache> Create(const ModelPlan& plan, const RankShape& shape,
                                        const CacheSize& size, Device& device);
  // The largest cache, at most `most`, that `bytes` hold. Slots take no more than half of them. It
  // may have no page, or no slot.
  static CacheSize Fit(const ModelPlan& plan, const RankShape& shape, const CacheSize& most,
                       double bytes);
  // The size of one page over all blocks, if each has memory of its own.
  static size_t PageBytes(const ModelPlan& plan, const RankShape& shape, int32_t page_size);

  // The memory of plan.blocks[block].
  BlockState of_block(size_t block) const {
    const Planes& planes = of_blocks_[block];
    return {.planes = memory_->get() + planes.offset,
            .plane_stride = planes.stride,
            .page_size = size_.page_size,
            .slots = memory_->get() + slots_of_blocks_[block].offset,
            .slot_stride = slots_of_blocks_[block].stride};
  }
  // Copies pages of every block, in order with the ops. Not if the memory is shared.
  absl::Status CopyPages(absl::Span<const PageCopy> copies, Backend& ops) const;
  const CacheSize& size() const { return size_; }
  size_t bytes() const { return memory_->bytes(); }  // that are currently allocated

  // Free the memory, and allocate it again at the same address, as ReleasableMemory says.
  absl::Status Release() { return memory_->Release(); }
  absl::Status Restore() { return memory_->Restore(); }

 private:
  // Planes one after the other, in bytes from the begin of the memory.
  struct Planes {
    size_t offset = 0;
    size_t stride = 0;
    int32_t count = 0;
  };
  KvCache() = default;

  CacheSize size_;
  std::vector<Planes> of_blocks_;        // [block]
  std::vector<Planes> runs_;             // the same, neighbours of equal stride together
  std::vector<Planes> slots_of_blocks_;  // [block]; a plane is a slot
  std::unique_ptr<ReleasableMemory> memory_;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_KV_CACHE_H_
