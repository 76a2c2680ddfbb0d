// Which KV pages are free and which a sequence holds. Not their memory: that is kernels/model's
// KvCache, where one page number means the same page on every rank and layer.
#ifndef ISOBIT_ROLLOUT_KV_PAGES_H_
#define ISOBIT_ROLLOUT_KV_PAGES_H_

#include <cstdint>
#include <vector>

namespace isobit {

// Not thread-safe. INVARIANT: a page is either free or in exactly one page table
// (SchedulerTest.LeaksNoPageOverRandomOperations).
class KvPages {
 public:
  // num_pages > 0 pages of page_size > 0 tokens, all free.
  KvPages(int32_t num_pages, int32_t page_size);

  // The pages that positions [0, tokens) need.
  int64_t PagesFor(int64_t tokens) const { return (tokens + page_size_ - 1) / page_size_; }

  // Makes `table` cover positions [0, tokens). False, with nothing changed, when too few pages are
  // free.
  bool Grow(std::vector<int32_t>& table, int64_t tokens);

  // Frees the table's pages and empties it.
  void Free(std::vector<int32_t>& table);

  int32_t num_pages() const { return static_cast<int32_t>(is_free_.size()); }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t page_size() const { return page_size_; }

 private:
  const int32_t page_size_;
  std::vector<int32_t> free_;  // a stack: the page freed last is still warm
  std::vector<bool> is_free_;  // by page number
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_KV_PAGES_H_
