// Hands out pages and slots, and counts who has them.
#include "rollout/schedule/state_pool.h"

#include <algorithm>
#include <utility>

#include "common/base/check.h"

namespace isobit {

StatePool::StatePool(const PoolSize& size)
    : page_size_(size.page_size),
      max_cached_(size.max_cached),
      slots_(size.num_slots, size.slot_rows),
      tree_(size.num_pages, size.page_size, slots_) {
  ISOBIT_CHECK(size.num_pages > 0 && page_size_ > 0 && max_cached_ >= 0)
      << size.num_pages << " pages of " << page_size_ << ", at most " << max_cached_ << " cached";
  counts_.assign(Index(size.num_pages), 0);
  for (int32_t page = size.num_pages - 1; page >= 0; --page) free_.push_back(page);
}

bool StatePool::Grow(SequenceState& state, int64_t tokens, int64_t max_tokens) {
  const int64_t wanted = PagesFor(tokens) - static_cast<int64_t>(state.size());
  if (wanted > num_free()) return false;
  Reserve(state, max_tokens);
  ISOBIT_CHECK(PagesFor(tokens) <= static_cast<int64_t>(state.capacity_))
      << tokens << " tokens, at most " << max_tokens;
  for (int64_t i = 0; i < wanted; ++i) Append(state, Take());
  return true;
}

StatePool::Prefix StatePool::Find(absl::Span<const int32_t> tokens) const {
  Prefix found = {.pages = tree_.Find(tokens)};
  found.known_rows = static_cast<int64_t>(found.pages.size()) * page_size_;
  if (!has_slots()) return found;
  while (!found.pages.empty() && tree_.SnapshotOf(found.pages.back()) == kNoSlot) {
    found.pages.pop_back();
  }
  return found;
}

bool StatePool::Begin(SequenceState& state, const Prefix& found, int64_t tokens, int64_t max_tokens,
                      int64_t left) {
  const auto unused =
      std::ranges::count_if(found.pages, [this](int32_t page) { return tree_.IsUnused(page); });
  const int64_t wanted = PagesFor(tokens) - static_cast<int64_t>(found.pages.size());
  if (wanted > num_free() - unused - left) return false;
  if (has_slots() && !found.pages.empty()) {
    state.slot_ = tree_.SnapshotOf(found.pages.back());
    slots_.Share(state.slot_);
  }
  if (!ReserveSlots(state, /*spare=*/false)) {
    FreeSlots(state);
    return false;
  }
  tree_.Touch(found.pages);
  Reserve(state, max_tokens);
  for (const int32_t page : found.pages) Append(state, page);
  return Grow(state, tokens, max_tokens);
}

void StatePool::Publish(SequenceState& state, absl::Span<const int32_t> tokens, int64_t first_row,
                        int64_t known_rows) {
  std::vector<int32_t> path = tree_.Find(tokens);
  // Behind pages that it could not begin with, its own must wait until it frees them: the tree
  // wants a page to be used together with those before it.
  if (std::equal(path.begin(), path.end(), state.begin())) {
    const auto known = std::ssize(path);
    path = tree_.Enter(tokens, state.data());
    new_.insert(new_.end(), path.begin() + known, path.end());
  }
  if (!has_slots()) return;
  int64_t row = known_rows;
  if (row <= first_row) row = (static_cast<int64_t>(tokens.size()) - 1) / page_size_ * page_size_;
  const auto num_pages = static_cast<size_t>(row / page_size_);
  if (row <= first_row || num_pages > path.size()) return;
  const int32_t page = path[num_pages - 1];
  if (tree_.SnapshotOf(page) != kNoSlot) return;
  const int32_t slot = TakeSlot();
  if (slot == kNoSlot) return;
  tree_.SetSnapshot(page, slot);
  new_.push_back(page);
  slots_.Share(slot);  // it must not be dropped before the step is planned
  state.snapshot_ = slot;
  state.snapshot_row_ = row;
}

void StatePool::BeginStep() {
  new_.clear();
  slots_.BeginStep();
}

bool StatePool::IsNew(int32_t page) const {
  return std::find(new_.begin(), new_.end(), page) != new_.end();
}

void StatePool::Share(const SequenceState& from, int64_t tokens, int64_t max_tokens,
                      SequenceState& to) {
  ISOBIT_CHECK(to.empty() && PagesFor(tokens) == static_cast<int64_t>(from.size()))
      << tokens << " tokens in " << from.size() << " pages";
  Reserve(to, max_tokens);
  for (const int32_t page : from) Append(to, page);
  to.last_is_borrowed_ = tokens % page_size_ != 0;
  if (!has_slots()) return;
  to.slot_ = from.next_slot_;
  to.slot_row_ = tokens;
  slots_.Share(to.slot_);
}

bool StatePool::OwnLastPage(SequenceState& state, std::vector<PageCopy>& copies) {
  if (!state.last_is_borrowed_) return true;
  int32_t& last = state.numbers_[state.size_ - 1];
  // Another page may have been published for its owner's tokens meanwhile, and must not change.
  if (counts_[Index(last)] > 1 || tree_.Has(last)) {
    if (num_free() == 0) return false;
    const int32_t own = Take();
    counts_[Index(own)] = 1;
    copies.push_back({.from = last, .to = own});
    Release(last);
    last = own;
  }
  state.last_is_borrowed_ = false;
  return true;
}

bool StatePool::ReserveSlots(SequenceState& state, bool spare) {
  if (!has_slots()) return true;
  const bool in_place = state.slot_ != kNoSlot && !slots_.IsShared(state.slot_);
  int32_t next = state.next_slot_;
  if (next == kNoSlot) next = in_place ? state.slot_ : TakeSlot();
  if (next == kNoSlot) return false;
  if (spare && state.spare_ == kNoSlot) {
    state.spare_ = TakeSlot();
    if (state.spare_ == kNoSlot) {
      if (next != state.slot_ && next != state.next_slot_) slots_.Release(next);
      return false;
    }
  }
  state.next_slot_ = next;
  return true;
}

SlotsOfStep StatePool::Extend(SequenceState& state, int64_t certain, int64_t end) {
  if (!has_slots()) return {};
  ISOBIT_CHECK(state.next_slot_ != kNoSlot) << "a step without a slot";
  SlotsOfStep slots = {.from = state.slot_, .to = state.next_slot_};
  if (state.snapshot_ != kNoSlot) {
    slots.cut_slot = std::exchange(state.snapshot_, kNoSlot);
    slots.cut = state.snapshot_row_;
    slots_.ReleaseAfterStep(slots.cut_slot);
  } else if (!slots_.Serves(end, certain)) {
    ISOBIT_CHECK(state.spare_ != kNoSlot) << "guesses without a slot to return to";
    slots.cut_slot = state.spare_;
    slots.cut = state.spare_row_ = certain;
  }
  if (state.slot_ != kNoSlot && state.slot_ != state.next_slot_) {
    slots_.ReleaseAfterStep(state.slot_);
  }
  state.slot_ = std::exchange(state.next_slot_, kNoSlot);
  state.slot_row_ = end;
  return slots;
}

SlotsOfStep StatePool::ExtendByCandidate(SequenceState& state, bool is_first) {
  if (!has_slots()) return {};
  ISOBIT_CHECK(state.spare_ != kNoSlot) << "candidates without a slot";
  return {.from = is_first ? state.slot_ : state.spare_, .to = state.spare_};
}

int64_t StatePool::Return(SequenceState& state, int64_t row, int64_t tokens) {
  const auto needed = static_cast<size_t>(PagesFor(tokens));
  while (state.size_ > needed) Release(state.numbers_[--state.size_]);
  if (!has_slots()) return row;
  if (!slots_.Serves(state.slot_row_, row)) {
    std::swap(state.slot_, state.spare_);
    row = state.spare_row_;
  }
  state.slot_row_ = row;
  if (state.spare_ != kNoSlot) slots_.Release(std::exchange(state.spare_, kNoSlot));
  return row;
}

void StatePool::Free(SequenceState& state, absl::Span<const int32_t> tokens) {
  std::vector<int32_t> path = tree_.Find(tokens);
  if (!std::equal(path.begin(), path.end(), state.begin())) {
    // Behind pages of others, only what nobody uses from now on.
    const auto* const shared = std::find_if(state.begin() + path.size(), state.end(),
                                            [this](int32_t page) { return count(page) > 1; });
    const auto own = static_cast<size_t>((shared - state.begin()) * page_size_);
    tokens = tokens.first(std::min(tokens.size(), own));
  }
  path = tree_.Enter(tokens, state.data());
  for (size_t i = state.size_; i > 0; --i) Release(state.numbers_[i - 1]);
  tree_.Touch(path);
  while (num_cached() > max_cached_) free_.push_back(tree_.TakeOldest());
  state.size_ = 0;
  state.last_is_borrowed_ = false;
  FreeSlots(state);
}

void StatePool::FreeSlots(SequenceState& state) {
  if (state.next_slot_ == state.slot_) state.next_slot_ = kNoSlot;
  for (int32_t* const slot : {&state.slot_, &state.next_slot_, &state.spare_, &state.snapshot_}) {
    if (*slot != kNoSlot) slots_.Release(std::exchange(*slot, kNoSlot));
  }
}

int32_t StatePool::TakeSlot() {
  const int32_t slot = slots_.Take();
  return slot == kNoSlot && tree_.DropOldestSnapshot() ? slots_.Take() : slot;
}

void StatePool::Forget() {
  ISOBIT_CHECK(num_free() == num_pages()) << "pages in use hold what is to be forgotten";
  for (const int32_t page : tree_.TakeAll()) free_.push_back(page);
}

void StatePool::Reserve(SequenceState& state, int64_t max_tokens) const {
  if (state.capacity_ > 0) return;
  state.capacity_ = static_cast<size_t>(PagesFor(max_tokens));
  state.numbers_ = std::make_unique_for_overwrite<int32_t[]>(state.capacity_);
}

void StatePool::Append(SequenceState& state, int32_t page) {
  tree_.SetUsed(page);
  if (++counts_[Index(page)] == 2) ++num_shared_;
  state.numbers_[state.size_++] = page;
}

int32_t StatePool::Take() {
  if (free_.empty()) return tree_.TakeOldest();
  const int32_t page = free_.back();
  free_.pop_back();
  return page;
}

void StatePool::Release(int32_t page) {
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
