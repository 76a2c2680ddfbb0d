// Which KV pages and slots are free, which a sequence holds, and which several share. Their memory
// is in kernels/model's KvCache, where a number means the same page or slot on every rank and
// layer. A sequence's state can be extended, shared with another sequence, kept as a snapshot, and
// returned to an earlier row. Which kinds of state a model has is known here alone.
//
// Sequences that begin with the same tokens share whole pages, which are counted. Pages that no
// sequence uses stay in a cache until they are needed. Only its owner writes to a page. A sequence
// may borrow a page that its prompt only half fills; it copies the page before it writes.
//
// A slot is counted, too. A step reads one slot and writes another where the first is shared, so
// nothing is copied. Beside the pages of a prompt the cache keeps a snapshot of the slot, because
// the pages alone do not let a sequence go on.
#ifndef ISOBIT_ROLLOUT_SCHEDULE_STATE_POOL_H_
#define ISOBIT_ROLLOUT_SCHEDULE_STATE_POOL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "kernels/ops/paged_kv.h"
#include "kernels/ops/sequences.h"
#include "rollout/schedule/prefix_tree.h"
#include "rollout/schedule/state_slots.h"

namespace isobit {

// The slots that a step reads and writes for a sequence's rows. All kNoSlot: the model has none.
struct SlotsOfStep {
  int32_t from = kNoSlot;
  int32_t to = kNoSlot;
  // If it is a slot: it takes the state before row `cut`, which is one of the sequence's rows in
  // the step, but the first.
  int32_t cut_slot = kNoSlot;
  int64_t cut = 0;
};

// The pages of one sequence, by position, and its slots. StatePool fills and empties it.
// INVARIANT: a page number keeps its address and value until the table is emptied and filled again,
// because steps in flight read it there (StatePoolTest.NumbersStayInPlace). The exception is a
// borrowed page that no step of this sequence has used: its copy replaces it.
class SequenceState {
 public:
  const int32_t* data() const { return numbers_.get(); }
  const int32_t* begin() const { return data(); }
  const int32_t* end() const { return data() + size_; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

 private:
  friend class StatePool;
  std::unique_ptr<int32_t[]> numbers_;
  size_t size_ = 0;
  size_t capacity_ = 0;
  bool last_is_borrowed_ = false;

  // Of a model with slots.
  int32_t slot_ = kNoSlot;  // the state before row slot_row_
  int64_t slot_row_ = 0;
  int32_t next_slot_ = kNoSlot;  // reserved for the state behind the coming step; may be slot_
  // A second slot: to return to row spare_row_, or with the state behind candidates.
  int32_t spare_ = kNoSlot;
  int64_t spare_row_ = 0;
  int32_t snapshot_ = kNoSlot;  // the coming step fills it with the state before row snapshot_row_
  int64_t snapshot_row_ = 0;
};

struct PoolSize {
  int32_t num_pages = 0;
  int32_t page_size = 0;   // tokens
  int32_t max_cached = 0;  // pages that cache prefixes no sequence uses
  int32_t num_slots = 0;   // 0: the model has none
  int32_t slot_rows = 1;   // as in StateSpec
};

// Not thread-safe. INVARIANT: a page is free, or in as many tables as its count says, or in the
// cache and in no table (PrefixSharingDepthTest.KeepsCountsOverRandomOperations).
class StatePool {
 public:
  // All free. num_pages > 0, page_size > 0.
  explicit StatePool(const PoolSize& size);

  // The number of pages for positions [0, tokens).
  int64_t PagesFor(int64_t tokens) const { return (tokens + page_size_ - 1) / page_size_; }

  // Makes the pages cover positions [0, tokens). They will never cover more than `max_tokens`.
  // Takes free pages first, then the least recently used cached ones. False: there are too few, and
  // nothing has changed.
  bool Grow(SequenceState& state, int64_t tokens, int64_t max_tokens);

  // What the cache and other sequences have of a sequence's first tokens.
  struct Prefix {
    std::vector<int32_t> pages;  // whole ones, with which it can begin
    // Rows from which it could begin if there were a snapshot; no less than those of `pages`.
    int64_t known_rows = 0;
  };
  Prefix Find(absl::Span<const int32_t> tokens) const;
  // Begins an empty state with what Find has just returned, and extends it to positions
  // [0, tokens), as Grow and ReserveSlots do. Leaves at least `left` pages free.
  bool Begin(SequenceState& state, const Prefix& found, int64_t tokens, int64_t max_tokens,
             int64_t left);
  // Lets other sequences find the whole pages of `tokens`. The state's pages hold these tokens, or
  // will hold them once the steps scheduled so far have ended. If there is a slot for it, the
  // coming step, which computes the rows from first_row on, leaves a snapshot at the row
  // known_rows if that is behind first_row, or else at the last page's end from which others can
  // begin.
  void Publish(SequenceState& state, absl::Span<const int32_t> tokens, int64_t first_row,
               int64_t known_rows);
  // Whether a page that Find has returned, or its snapshot, was first published since the last call
  // of BeginStep.
  bool IsNew(int32_t page) const;
  void BeginStep();

  // Fills the empty state `to` with all that `from` will have after the coming step: pages for
  // positions [0, tokens) and nothing more, and the slot. If the last page is filled in part, it is
  // borrowed.
  void Share(const SequenceState& from, int64_t tokens, int64_t max_tokens, SequenceState& to);
  // Call before the sequence writes to its last page. If the page is borrowed and not yet its own,
  // replaces it and adds the copy to make to `copies`. False: there is no page for the copy, and
  // nothing has changed.
  bool OwnLastPage(SequenceState& state, std::vector<PageCopy>& copies);

  // Makes sure that the coming step has a slot for the state behind its rows and, with `spare`, a
  // second one. False: there are too few, and nothing has changed.
  bool ReserveSlots(SequenceState& state, bool spare);
  // The slots of the coming step, for which they are reserved. It computes the sequence's rows up
  // to `end`, of which those from `certain` on are guesses.
  SlotsOfStep Extend(SequenceState& state, int64_t certain, int64_t end);
  // Likewise for a row that draws a candidate, the first one or one behind others. The state itself
  // stays as it is.
  SlotsOfStep ExtendByCandidate(SequenceState& state, bool is_first);

  // Goes back to row `row`, or to an earlier one from which the sequence can go on, and returns
  // that. Frees the pages behind those of positions [0, tokens). They must not be shared, and no
  // step in flight may belong to the sequence.
  int64_t Return(SequenceState& state, int64_t row, int64_t tokens);

  // Empties the state and frees the pages and slots that no other has. `tokens`: what the pages
  // hold; whole pages stay in the cache. INVARIANT: freed pages may be handed out at once, even if
  // a step in flight still uses them: each rank computes that step before every step that is
  // launched later (EngineTest.ReusesPagesWhileAStepInFlightWritesThem).
  void Free(SequenceState& state, absl::Span<const int32_t> tokens = {});

  // Empties the cache. No table may have a page.
  void Forget();

  int32_t num_pages() const { return static_cast<int32_t>(counts_.size()); }
  // The number of pages that Grow can take, cached ones included.
  int32_t num_free() const { return static_cast<int32_t>(free_.size()) + num_cached(); }
  int32_t num_cached() const { return tree_.num_unused(); }
  int32_t num_shared() const { return num_shared_; }  // that several tables have
  int32_t page_size() const { return page_size_; }
  int32_t count(int32_t page) const { return counts_[Index(page)]; }  // tables that have it
  bool has_slots() const { return slots_.exist(); }

 private:
  static size_t Index(int32_t page) { return static_cast<size_t>(page); }
  void Reserve(SequenceState& state, int64_t max_tokens) const;
  void Append(SequenceState& state, int32_t page);  // and counts it
  int32_t Take();                                   // one of num_free() pages
  void Release(int32_t page);                       // one table fewer has it
  void FreeSlots(SequenceState& state);
  int32_t TakeSlot();  // a snapshot goes for it; kNoSlot: there is none

  const int32_t page_size_;
  const int32_t max_cached_;
  std::vector<int32_t> free_;    // a stack: the page freed last is still warm
  std::vector<int32_t> counts_;  // by page: the tables that have it
  int32_t num_shared_ = 0;       // of counts_, those over 1
  std::vector<int32_t> new_;     // published since BeginStep
  StateSlots slots_;
  PrefixTree tree_;
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SCHEDULE_STATE_POOL_H_
