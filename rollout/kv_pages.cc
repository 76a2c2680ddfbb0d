// Hands out KV pages. See kv_pages.h.
#include "rollout/kv_pages.h"

#include "common/base/check.h"

namespace isobit {

KvPages::KvPages(int32_t num_pages, int32_t page_size) : page_size_(page_size) {
  ISOBIT_CHECK(num_pages > 0 && page_size > 0) << num_pages << " pages of " << page_size;
  is_free_.assign(static_cast<size_t>(num_pages), true);
  for (int32_t page = num_pages - 1; page >= 0; --page) free_.push_back(page);
}

bool KvPages::Grow(PageTable& table, int64_t tokens, int64_t max_tokens) {
  const int64_t wanted = PagesFor(tokens) - static_cast<int64_t>(table.size());
  if (wanted > num_free()) return false;
  if (table.capacity_ == 0) {
    table.capacity_ = static_cast<size_t>(PagesFor(max_tokens));
    table.numbers_ = std::make_unique_for_overwrite<int32_t[]>(table.capacity_);
  }
  ISOBIT_CHECK(PagesFor(tokens) <= static_cast<int64_t>(table.capacity_))
      << tokens << " tokens, at most " << max_tokens;
  for (int64_t i = 0; i < wanted; ++i) {
    const int32_t page = free_.back();
    free_.pop_back();
    is_free_[static_cast<size_t>(page)] = false;
    table.numbers_[table.size_++] = page;
  }
  return true;
}

void KvPages::Free(PageTable& table) {
  for (const int32_t page : table) {
    ISOBIT_CHECK(!is_free_[static_cast<size_t>(page)]) << "page " << page << " freed twice";
    is_free_[static_cast<size_t>(page)] = true;
    free_.push_back(page);
  }
  table.size_ = 0;
}

}  // namespace isobit
