// Where each layer's keys and values lie.
#include "kernels/model/kv_cache.h"

#include "common/base/status_macros.h"
#include "kernels/ops/paged_kv.h"

namespace isobit {

absl::StatusOr<KvCache> KvCache::Create(const ModelConfig& config, const RankShape& shape,
                                        int32_t num_pages, int32_t page_size, bool shared_layers,
                                        Device& device) {
  KvCache cache;
  cache.num_pages_ = num_pages;
  cache.shared_layers_ = shared_layers;
  cache.geometry_.page_size = page_size;
  cache.geometry_.kv_heads = static_cast<int32_t>(shape.kv_heads.size());
  cache.geometry_.head_dim = config.head_dim;
  const auto layers = static_cast<size_t>(config.num_layers);
  const size_t layer_bytes =
      PageBytes(config, shape, page_size) / layers * static_cast<size_t>(num_pages);
  cache.layer_elements_ = layer_bytes / (2 * sizeof(Bf16));
  cache.num_layers_ = shared_layers ? 1 : config.num_layers;
  const size_t bytes = shared_layers ? layer_bytes : layers * layer_bytes;
  ISOBIT_ASSIGN_OR_RETURN(cache.memory_, device.AllocateReleasable(bytes));
  return cache;
}

size_t KvCache::PageBytes(const ModelConfig& config, const RankShape& shape, int32_t page_size) {
  return 2 * sizeof(Bf16) * static_cast<size_t>(page_size) *
         static_cast<size_t>(shape.kv_heads.size()) * static_cast<size_t>(config.head_dim) *
         static_cast<size_t>(config.num_layers);
}

absl::Status KvCache::CopyPages(absl::Span<const PageCopy> copies, Backend& ops) const {
  if (copies.empty()) return absl::OkStatus();
  return ops.Run(CopyPagesArgs{
      .planes = reinterpret_cast<Bf16*>(memory_->get()),
      .num_planes = 2 * num_layers_,
      .plane_stride = static_cast<int64_t>(layer_elements_),
      .page_elements = int64_t{geometry_.kv_heads} * geometry_.page_size * geometry_.head_dim,
      .copies = copies});
}

PagedKv KvCache::layer(int layer) const {
  PagedKv kv = geometry_;
  const size_t index = shared_layers_ ? 0 : static_cast<size_t>(layer);
  kv.k = reinterpret_cast<Bf16*>(memory_->get()) + 2 * index * layer_elements_;
  kv.v = kv.k + layer_elements_;
  return kv;
}

}  // namespace isobit
