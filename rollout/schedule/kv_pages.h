// Which KV pages are free, which a sequence holds, and which several share. Their memory is in
// kernels/model's KvCache, where a page number means the same page on every rank and layer.
//
// Sequences that begin with the same tokens share whole pages, which are counted. Pages that no
// sequence uses stay in a cache until they are needed. Only its owner writes to a page. A sequence
// may borrow a page that its prompt only half fills; it copies the page before it writes.
#ifndef ISOBIT_ROLLOUT_SCHEDULE_KV_PAGES_H_
#define ISOBIT_ROLLOUT_SCHEDULE_KV_PAGES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "kernels/ops/paged_kv.h"
#include "rollout/schedule/prefix_tree.h"

namespace isobit {

// The pages of one sequence, by position. KvPages fills and empties it.
// INVARIANT: a page number keeps its address and value until the table is emptied and filled again,
// because steps in flight read it there (KvPagesTest.NumbersStayInPlace). The exception is a
// borrowed page that no step of this sequence has used: its copy replaces it.
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
  bool last_is_borrowed_ = false;
};

// Not thread-safe. INVARIANT: a page is free, or in as many tables as its count says, or in the
// cache and in no table (PrefixSharingDepthTest.KeepsCountsOverRandomOperations).
class KvPages {
 public:
  // num_pages > 0 pages of page_size > 0 tokens, all free. max_cached: bound of the cached pages.
  KvPages(int32_t num_pages, int32_t page_size, int32_t max_cached = 0);

  // The number of pages for positions [0, tokens).
  int64_t PagesFor(int64_t tokens) const { return (tokens + page_size_ - 1) / page_size_; }

  // Makes `table` cover positions [0, tokens). It will never cover more than `max_tokens`. Takes
  // free pages first, then the least recently used cached ones. False: there are too few, and
  // nothing has changed.
  bool Grow(PageTable& table, int64_t tokens, int64_t max_tokens);

  // The longest run of whole pages, from the first token on, that are in the cache or in a table.
  std::vector<int32_t> Find(absl::Span<const int32_t> tokens) const { return tree_.Find(tokens); }
  // Like Grow, for an empty table. The table begins with the pages `found`, which Find has just
  // returned. Leaves at least `left` pages free.
  bool Begin(PageTable& table, absl::Span<const int32_t> found, int64_t tokens, int64_t max_tokens,
             int64_t left);
  // Lets other sequences find the whole pages of `tokens`. The table's pages hold these tokens, or
  // will hold them once the steps scheduled so far have ended.
  void Publish(const PageTable& table, absl::Span<const int32_t> tokens);
  // Whether a page that Find has returned was first published since the last call of BeginStep.
  bool IsNew(int32_t page) const;
  void BeginStep() { new_.clear(); }

  // Fills the empty table `to` with all pages of `from`, which cover positions [0, tokens) and
  // nothing more. If the last of them is filled in part, it is borrowed.
  void Share(const PageTable& from, int64_t tokens, int64_t max_tokens, PageTable& to);
  // Call before the sequence writes to its last page. If the page is borrowed and not yet its own,
  // replaces it and adds the copy to make to `copies`. False: there is no page for the copy, and
  // nothing has changed.
  bool OwnLastPage(PageTable& table, std::vector<PageCopy>& copies);

  // Frees the table's pages behind those of positions [0, tokens). They must not be shared, and no
  // step in flight may belong to the sequence.
  void Trim(PageTable& table, int64_t tokens);

  // Empties the table and frees the pages that no other table has. `tokens`: what the pages hold;
  // whole pages stay in the cache. INVARIANT: freed pages may be handed out at once, even
  // if a step in flight still uses them: each rank computes that step before every step that is
  // launched later (EngineTest.ReusesPagesWhileAStepInFlightWritesThem).
  void Free(PageTable& table, absl::Span<const int32_t> tokens = {});

  // Empties the cache. No table may have a page.
  void Forget();

  int32_t num_pages() const { return static_cast<int32_t>(counts_.size()); }
  // The number of pages that Grow can take, cached ones included.
  int32_t num_free() const { return static_cast<int32_t>(free_.size()) + num_cached(); }
  int32_t num_cached() const { return tree_.num_unused(); }
  int32_t num_shared() const { return num_shared_; }  // that several tables have
  int32_t page_size() const { return page_size_; }
  int32_t count(int32_t page) const { return counts_[Index(page)]; }  // tables that have it

 private:
  static size_t Index(int32_t page) { return static_cast<size_t>(page); }
  void Reserve(PageTable& table, int64_t max_tokens) const;
  void Append(PageTable& table, int32_t page);  // and counts it
  int32_t Take();                               // one of num_free() pages
  void Release(int32_t page);                   // one table fewer has it

  const int32_t page_size_;
  const int32_t max_cached_;
  std::vector<int32_t> free_;    // a stack: the page freed last is still warm
  std::vector<int32_t> counts_;  // by page: the tables that have it
  int32_t num_shared_ = 0;       // of counts_, those over 1
  std::vector<int32_t> new_;     // published since BeginStep
  PrefixTree tree_;
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SCHEDULE_KV_PAGES_H_
