// The memory of one rank's KV cache. Not here: which pages belong to which sequence.
#ifndef ISOBIT_KERNELS_MODEL_KV_CACHE_H_
#define ISOBIT_KERNELS_MODEL_KV_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/checkpoint/model_config.h"
#include "kernels/backend.h"
#include "kernels/device.h"
#include "kernels/blocks/rank_shape.h"
#include "kernels/ops/paged_kv.h"

namespace isobit {

// One rank's KV cache. A page number means the same page in every layer.
class KvCache {
 public:
  // shared_layers: all layers use the memory of one, for a pass that computes whole sequences and
  // keeps nothing. RESOURCE_EXHAUSTED: the cache does not fit into the backend's memory.
  static absl::StatusOr<KvCache> Create(const ModelConfig& config, const RankShape& shape,
                                        int32_t num_pages, int32_t page_size, bool shared_layers,
                                        Device& device);
  // The size of one page over all layers, if each layer has memory of its own.
  static size_t PageBytes(const ModelConfig& config, const RankShape& shape, int32_t page_size);

  PagedKv layer(int layer) const;
  // Copies pages of every layer, in order with the ops.
  absl::Status CopyPages(absl::Span<const PageCopy> copies, Backend& ops) const;
  int32_t num_pages() const { return num_pages_; }
  int32_t page_size() const { return geometry_.page_size; }
  size_t bytes() const { return memory_->bytes(); }  // that are currently allocated

  // Free the memory, and allocate it again at the same address, as ReleasableMemory says.
  absl::Status Release() { return memory_->Release(); }
  absl::Status Restore() { return memory_->Restore(); }

 private:
  KvCache() = default;

  PagedKv geometry_;  // pointers null
  int32_t num_pages_ = 0;
  size_t layer_elements_ = 0;  // of k; v has as many
  int num_layers_ = 0;         // those with memory of their own
  bool shared_layers_ = false;
  std::unique_ptr<ReleasableMemory> memory_;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_KV_CACHE_H_
