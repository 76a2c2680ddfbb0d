// Which KV pages hold which tokens, so that sequences that begin alike can share them: a radix tree
// whose edges are whole pages of tokens. A path from the root is the beginning of a sequence. The
// tree also knows which pages are unused, and which of these was used least recently. Beside a page
// it may hold a snapshot: a slot with the state behind the page's last token.
#ifndef ISOBIT_ROLLOUT_SCHEDULE_PREFIX_TREE_H_
#define ISOBIT_ROLLOUT_SCHEDULE_PREFIX_TREE_H_

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <vector>

#include "absl/types/span.h"
#include "rollout/schedule/state_slots.h"

namespace isobit {

// Not thread-safe. The caller says which pages are used. It uses a page only together with all
// pages before it on the path, so that all pages behind an unused page are unused, too.
class PrefixTree {
 public:
  // For pages [0, num_pages) of page_size tokens. No page is in the tree. `slots` outlives it.
  PrefixTree(int32_t num_pages, int32_t page_size, StateSlots& slots);

  // The pages that hold the longest beginning of `tokens` in the tree, in order.
  std::vector<int32_t> Find(absl::Span<const int32_t> tokens) const;

  // Enters pages[0], pages[1], ..., which hold the whole pages of `tokens` and are in use. If the
  // tree already has a page of the same tokens, it keeps that one. Returns the path of the tree's
  // pages.
  std::vector<int32_t> Enter(absl::Span<const int32_t> tokens, const int32_t* pages);

  // Whether the page is in the tree. For the calls below it must be.
  bool Has(int32_t page) const { return nodes_[Index(page)].in_tree; }
  bool IsUnused(int32_t page) const { return nodes_[Index(page)].unused; }
  // Of pages that become unused together, pass the one furthest from the root first.
  void SetUnused(int32_t page);
  void SetUsed(int32_t page);
  // Makes the unused pages of a path, and its snapshots, the most recently used ones.
  void Touch(absl::Span<const int32_t> path);

  int32_t num_unused() const { return static_cast<int32_t>(unused_.size()); }
  // Removes and returns the page that has been unused for longest. There must be one.
  int32_t TakeOldest();
  // Removes all pages. Returns those that were unused.
  std::vector<int32_t> TakeAll();

  // The page's snapshot; kNoSlot: it has none.
  int32_t SnapshotOf(int32_t page) const { return nodes_[Index(page)].snapshot; }
  // Gives the page, which has none, a snapshot. The tree now holds the slot, and releases it when
  // the page leaves the tree.
  void SetSnapshot(int32_t page, int32_t slot);
  // Drops the snapshot that has been unused for longest and that nobody else holds. False: there is
  // none.
  bool DropOldestSnapshot();

 private:
  using Children = std::map<absl::Span<const int32_t>, int32_t>;  // pages, by their tokens

  struct Node {
    bool in_tree = false;
    bool unused = false;
    int32_t parent = 0;           // a page, or kRoot
    std::vector<int32_t> tokens;  // [page_size]
    Children children;
    std::list<int32_t>::iterator place{};  // in unused_
    int32_t snapshot = kNoSlot;
    std::list<int32_t>::iterator snapshot_link{};  // in snapshots_
  };
  static constexpr int32_t kRoot = -1;

  static size_t Index(int32_t page) { return static_cast<size_t>(page); }
  const Children& ChildrenOf(int32_t page) const {
    return page == kRoot ? first_ : nodes_[Index(page)].children;
  }
  void Remove(int32_t page);
  void DropSnapshot(Node& node);

  const size_t page_size_;
  std::vector<Node> nodes_;    // by page
  Children first_;             // pages at which sequences begin
  std::list<int32_t> unused_;  // the oldest first
  StateSlots& slots_;
  std::list<int32_t> snapshots_;  // pages that have one, the oldest first
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SCHEDULE_PREFIX_TREE_H_
