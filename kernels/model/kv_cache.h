// The memory in which a rank's blocks keep what they need of a sequence's past (Block::State):
// pages of tokens. Not here: which pages belong to which sequence.
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

// One rank's pages. A page number means the same page in every block.
class KvCache {
 public:
  // shared: all blocks use the memory of one, for a pass that computes whole sequences and keeps
  // nothing. RESOURCE_EXHAUSTED: the cache does not fit into the backend's memory.
  static absl::StatusOr<KvCache> Create(const ModelPlan& plan, const RankShape& shape,
                                        int32_t num_pages, int32_t page_size, bool shared,
                                        Device& device);
  // The size of one page over all blocks, if each has memory of its own.
  static size_t PageBytes(const ModelPlan& plan, const RankShape& shape, int32_t page_size);

  // The memory of plan.blocks[block].
  BlockState of_block(size_t block) const {
    const Planes& planes = of_blocks_[block];
    return {memory_->get() + planes.offset, planes.stride, page_size_};
  }
  // Copies pages of every block, in order with the ops. Not if the memory is shared.
  absl::Status CopyPages(absl::Span<const PageCopy> copies, Backend& ops) const;
  int32_t num_pages() const { return num_pages_; }
  int32_t page_size() const { return page_size_; }
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

  int32_t num_pages_ = 0;
  int32_t page_size_ = 0;
  std::vector<Planes> of_blocks_;  // [block]
  std::vector<Planes> runs_;       // the same, neighbours of equal stride together
  std::unique_ptr<ReleasableMemory> memory_;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_KV_CACHE_H_
