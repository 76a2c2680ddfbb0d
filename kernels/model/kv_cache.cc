// Where each block's pages lie.
#include "kernels/model/kv_cache.h"

#include <algorithm>

#include "common/base/status_macros.h"

namespace isobit {

absl::StatusOr<KvCache> KvCache::Create(const ModelPlan& plan, const RankShape& shape,
                                        int32_t num_pages, int32_t page_size, bool shared,
                                        Device& device) {
  KvCache cache;
  cache.num_pages_ = num_pages;
  cache.page_size_ = page_size;
  size_t end = 0;
  for (const auto& block : plan.blocks) {
    const StateSpec spec = block->State(shape);
    const size_t stride =
        spec.plane_bytes * static_cast<size_t>(page_size) * static_cast<size_t>(num_pages);
    const Planes planes = {shared ? 0 : end, stride, spec.num_planes};
    const size_t bytes = stride * static_cast<size_t>(spec.num_planes);
    end = shared ? std::max(end, bytes) : end + bytes;
    cache.of_blocks_.push_back(planes);
    if (bytes == 0 || shared) continue;
    if (!cache.runs_.empty() && cache.runs_.back().stride == stride) {
      cache.runs_.back().count += planes.count;
    } else {
      cache.runs_.push_back(planes);
    }
  }
  ISOBIT_ASSIGN_OR_RETURN(cache.memory_, device.AllocateReleasable(end));
  return cache;
}

size_t KvCache::PageBytes(const ModelPlan& plan, const RankShape& shape, int32_t page_size) {
  size_t bytes = 0;
  for (const auto& block : plan.blocks) {
    bytes += block->State(shape).bytes() * static_cast<size_t>(page_size);
  }
  return bytes;
}

absl::Status KvCache::CopyPages(absl::Span<const PageCopy> copies, Backend& ops) const {
  if (copies.empty()) return absl::OkStatus();
  for (const Planes& run : runs_) {
    const auto stride = static_cast<int64_t>(run.stride / sizeof(Bf16));
    ISOBIT_RETURN_IF_ERROR(
        ops.Run(CopyPagesArgs{.planes = reinterpret_cast<Bf16*>(memory_->get() + run.offset),
                              .num_planes = run.count,
                              .plane_stride = stride,
                              .page_elements = stride / num_pages_,
                              .copies = copies}));
  }
  return absl::OkStatus();
}

}  // namespace isobit
