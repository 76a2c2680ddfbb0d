// Hands out KV pages and counts who has them. See kv_pages.h.
#include "rollout/schedule/kv_pages.h"

#include <algorithm>

#include "common/base/check.h"

namespace isobit {

KvPages::KvPages(int32_t num_pages, int32_t page_size, int32_t max_cached)
    : page_size_(page_size), max_cached_(max_cached), tree_(num_pages, page_size) {
  ISOBIT_CHECK(num_pages > 0 && page_size > 0 && max_cached >= 0)
      << num_pages << " pages of " << page_size << ", at most " << max_cached << " cached";
  counts_.assign(Index(num_pages), 0);
  for (int32_t page = num_pages - 1; page >= 0; --page) free_.push_back(page);
}

bool KvPages::Grow(PageTable& table, int64_t tokens, int64_t max_tokens) {
  const int64_t wanted = PagesFor(tokens) - static_cast<int64_t>(table.size());
  if (wanted > num_free()) return false;
  Reserve(table, max_tokens);
  ISOBIT_CHECK(PagesFor(tokens) <= static_cast<int64_t>(table.capacity_))
      << tokens << " tokens, at most " << max_tokens;
  for (int64_t i = 0; i < wanted; ++i) Append(table, Take());
  return true;
}

bool KvPages::Begin(PageTable& table, absl::Span<const int32_t> found, int64_t tokens,
                    int64_t max_tokens, int64_t left) {
  const auto unused = std::count_if(found.begin(), found.end(),
                                    [this](int32_t page) { return tree_.IsUnused(page); });
  const int64_t wanted = PagesFor(tokens) - static_cast<int64_t>(found.size());
  if (wanted > num_free() - unused - left) return false;
  Reserve(table, max_tokens);
  for (const int32_t page : found) Append(table, page);
  return Grow(table, tokens, max_tokens);
}

void KvPages::Publish(const PageTable& table, absl::Span<const int32_t> tokens) {
  const size_t known = tree_.Find(tokens).size();
  const std::vector<int32_t> path = tree_.Enter(tokens, table.data());
  new_.insert(new_.end(), path.begin() + static_cast<std::ptrdiff_t>(known), path.end());
}

bool KvPages::IsNew(int32_t page) const {
  return std::find(new_.begin(), new_.end(), page) != new_.end();
}

void KvPages::Share(const PageTable& from, int64_t tokens, int64_t max_tokens, PageTable& to) {
  ISOBIT_CHECK(to.empty() && PagesFor(tokens) == static_cast<int64_t>(from.size()))
      << tokens << " tokens in " << from.size() << " pages";
  Reserve(to, max_tokens);
  for (const int32_t page : from) Append(to, page);
  to.last_is_borrowed_ = tokens % page_size_ != 0;
}

bool KvPages::OwnLastPage(PageTable& table, std::vector<PageCopy>& copies) {
  if (!table.last_is_borrowed_) return true;
  int32_t& last = table.numbers_[table.size_ - 1];
  // Another page may have been published for its owner's tokens meanwhile, and must not change.
  if (counts_[Index(last)] > 1 || tree_.Has(last)) {
    if (num_free() == 0) return false;
    const int32_t own = Take();
    counts_[Index(own)] = 1;
    copies.push_back({.from = last, .to = own});
    Release(last);
    last = own;
  }
  table.last_is_borrowed_ = false;
  return true;
}

void KvPages::Trim(PageTable& table, int64_t tokens) {
  const auto needed = static_cast<size_t>(PagesFor(tokens));
  while (table.size_ > needed) Release(table.numbers_[--table.size_]);
}

void KvPages::Free(PageTable& table, absl::Span<const int32_t> tokens) {
  const std::vector<int32_t> path = tree_.Enter(tokens, table.data());
  for (size_t i = table.size_; i > 0; --i) Release(table.numbers_[i - 1]);
  tree_.Touch(path);
  while (num_cached() > max_cached_) free_.push_back(tree_.TakeOldest());
  table.size_ = 0;
  table.last_is_borrowed_ = false;
}

void KvPages::Forget() {
  ISOBIT_CHECK(num_free() == num_pages()) << "pages in use hold what is to be forgotten";
  for (const int32_t page : tree_.TakeAll()) free_.push_back(page);
}

void KvPages::Reserve(PageTable& table, int64_t max_tokens) const {
  if (table.capacity_ > 0) return;
  table.capacity_ = static_cast<size_t>(PagesFor(max_tokens));
  table.numbers_ = std::make_unique_for_overwrite<int32_t[]>(table.capacity_);
}

void KvPages::Append(PageTable& table, int32_t page) {
  tree_.SetUsed(page);
  if (++counts_[Index(page)] == 2) ++num_shared_;
  table.numbers_[table.size_++] = page;
}

int32_t KvPages::Take() {
  if (free_.empty()) return tree_.TakeOldest();
  const int32_t page = free_.back();
  free_.pop_back();
  return page;
}

void KvPages::Release(int32_t page) {
  ISOBIT_CHECK(counts_[Index(page)] > 0) << "page " << page << " freed twice";
  if (--counts_[Index(page)] == 1) --num_shared_;
  if (counts_[Index(page)] > 0) return;
  if (tree_.Has(page)) {
    tree_.SetUnused(page);
  } else {
    free_.push_back(page);
  }
}

}  // namespace isobit
