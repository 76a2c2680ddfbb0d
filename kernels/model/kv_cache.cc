// Where each block's pages and slots lie.
#include "kernels/model/kv_cache.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "common/base/round_up.h"
#include "common/base/status_macros.h"

namespace isobit {

absl::StatusOr<KvCache> KvCache::Create(const ModelPlan& plan, const RankShape& shape,
                                        const CacheSize& size, Device& device) {
  KvCache cache;
  cache.size_ = size;
  const auto page_size = static_cast<size_t>(size.page_size);
  size_t end = 0;
  for (const auto& block : plan.blocks) {
    const StateSpec spec = block->State(shape);
    const size_t stride = spec.plane_bytes * page_size * static_cast<size_t>(size.num_pages);
    const Planes planes = {size.shared ? 0 : end, stride, spec.num_planes};
    const size_t bytes = stride * static_cast<size_t>(spec.num_planes);
    end = size.shared ? std::max(end, bytes) : end + bytes;
    cache.of_blocks_.push_back(planes);
    if (bytes == 0 || size.shared) continue;
    if (!cache.runs_.empty() && cache.runs_.back().stride == stride) {
      cache.runs_.back().count += planes.count;
    } else {
      cache.runs_.push_back(planes);
    }
  }
  size_t begin_slots = RoundUp(end, kSlotAlignment);
  for (const auto& block : plan.blocks) {
    const size_t stride = RoundUp(block->State(shape).slot_bytes, kSlotAlignment);
    Planes& slots = cache.slots_of_blocks_.emplace_back();
    if (stride == 0) continue;
    slots = {begin_slots, stride, size.num_slots + 1};  // with kCutSlot
    const size_t bytes = stride * static_cast<size_t>(slots.count);
    end = std::max(end, begin_slots + bytes);
    if (!size.shared) begin_slots += bytes;
  }
  ISOBIT_ASSIGN_OR_RETURN(cache.memory_, device.AllocateReleasable(end));
  return cache;
}

SlotSpec SlotsOf(const ModelPlan& plan, const RankShape& shape) {
  SlotSpec slots;
  for (const auto& block : plan.blocks) {
    const StateSpec spec = block->State(shape);
    if (spec.slot_bytes == 0) continue;
    slots.bytes += RoundUp(spec.slot_bytes, kSlotAlignment);
    slots.rows = std::gcd(slots.rows, spec.slot_rows);
  }
  return slots;
}

CacheSize KvCache::Fit(const ModelPlan& plan, const RankShape& shape, const CacheSize& most,
                       double bytes) {
  CacheSize fit = most;
  if (const auto slot = static_cast<double>(SlotsOf(plan, shape).bytes); slot > 0) {
    const double slots = std::floor(bytes / 2 / slot) - 1;  // without kCutSlot
    fit.num_slots = static_cast<int32_t>(std::clamp<double>(slots, 0, most.num_slots));
    bytes -= slot * (fit.num_slots + 1);
  }
  if (const auto page = static_cast<double>(PageBytes(plan, shape, most.page_size)); page > 0) {
    fit.num_pages = static_cast<int32_t>(std::clamp<double>(bytes / page, 0, most.num_pages));
  }
  return fit;
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
                              .page_elements = stride / size_.num_pages,
                              .copies = copies}));
  }
  return absl::OkStatus();
}

}  // namespace isobit
