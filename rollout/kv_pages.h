// Which KV pages are free and which a sequence holds. Their memory is in kernels/model's KvCache,
// where a page number means the same page on every rank and layer.
#ifndef ISOBIT_ROLLOUT_KV_PAGES_H_
#define ISOBIT_ROLLOUT_KV_PAGES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace isobit {

// The pages of one sequence, by position. KvPages fills and empties it.
// INVARIANT: a page number keeps its address and value until the table is emptied and filled again,
// because steps in flight read it there (KvPagesTest.NumbersStayInPlace).
class PageTable {
 public:
  const int32_t* data() const { return numbers_.get(); }
  const int32_t* begin() const { return data(); }
  const int32_t* end() const { return data() + size_; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

 private:
  friend class KvPages;
  std::unique_ptr<int32_t[]> numbers_;
  size_t size_ = 0;
  size_t capacity_ = 0;
};

// Not thread-safe. INVARIANT: a page is either free or in exactly one page table
// (SchedulerDepthTest.LeaksNoPageOverRandomOperations).
class KvPages {
 public:
  // num_pages > 0 pages of page_size > 0 tokens, all free.
  KvPages(int32_t num_pages, int32_t page_size);

  // The pages that positions [0, tokens) need.
  int64_t PagesFor(int64_t tokens) const { return (tokens + page_size_ - 1) / page_size_; }

  // Makes `table` cover positions [0, tokens). It will never cover more than `max_tokens`.
  // False, with nothing changed: too few pages are free.
  bool Grow(PageTable& table, int64_t tokens, int64_t max_tokens);

  // Frees the table's pages and empties it. INVARIANT: the pages may be handed out again at once,
  // even if a step in flight still uses them: each rank computes that step before every step that
  // is launched later (EngineTest.ReusesPagesWhileAStepInFlightWritesThem).
  void Free(PageTable& table);

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
