// Hands out KV pages. See kv_pages.h.
#include "rollout/kv_pages.h"

#include "common/base/check.h"

namespace isobit {

KvPages::KvPages(int32_t num_pages, int32_t page_size) : page_size_(page_size) {
  ISOBIT_CHECK(num_pages > 0 && page_size > 0) << num_pages << " pages of " << page_size;
  is_free_.assign(static_cast<size_t>(num_pages), true);
  for (int32_t page = num_pages - 1; page >= 0; --page) free_.push_back(page);
}

bool KvPages::Grow(std::vector<int32_t>& table, int64_t tokens) {
  const int64_t wanted = PagesFor(tokens) - static_cast<int64_t>(table.size());
  if (wanted > num_free()) return false;
  for (int64_t i = 0; i < wanted; ++i) {
    const int32_t page = free_.back();
    free_.pop_back();
    is_free_[static_cast<size_t>(page)] = false;
    table.push_back(page);
  }
  return true;
}

void KvPages::Free(std::vector<int32_t>& table) {
  for (const int32_t page : table) {
    ISOBIT_CHECK(!is_free_[static_cast<size_t>(page)]) << "page " << page << " freed twice";
    is_free_[static_cast<size_t>(page)] = true;
    free_.push_back(page);
  }
  table.clear();
}

}  // namespace isobit
