// The nodes, and the order in which unused pages are taken.
#include "rollout/schedule/prefix_tree.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "common/base/check.h"

namespace isobit {

PrefixTree::PrefixTree(int32_t num_pages, int32_t page_size, StateSlots& slots)
    : page_size_(static_cast<size_t>(page_size)),
      nodes_(static_cast<size_t>(num_pages)),
      slots_(slots) {}

std::vector<int32_t> PrefixTree::Find(absl::Span<const int32_t> tokens) const {
  std::vector<int32_t> path;
  int32_t last = kRoot;
  for (size_t begin = 0; begin + page_size_ <= tokens.size(); begin += page_size_) {
    const Children& children = ChildrenOf(last);
    const auto child = children.find(tokens.subspan(begin, page_size_));
    if (child == children.end()) break;
    last = child->second;
    path.push_back(last);
  }
  return path;
}

std::vector<int32_t> PrefixTree::Enter(absl::Span<const int32_t> tokens, const int32_t* pages) {
  std::vector<int32_t> path = Find(tokens);
  for (size_t i = path.size(); (i + 1) * page_size_ <= tokens.size(); ++i) {
    const int32_t page = pages[i];
    Node& node = nodes_[Index(page)];
    ISOBIT_CHECK(!node.in_tree) << "page " << page << " would hold two things";
    const auto own = tokens.subspan(i * page_size_, page_size_);
    node.in_tree = true;
    node.parent = path.empty() ? kRoot : path.back();
    node.tokens.assign(own.begin(), own.end());
    Children& siblings = node.parent == kRoot ? first_ : nodes_[Index(node.parent)].children;
    siblings.emplace(node.tokens, page);
    path.push_back(page);
  }
  return path;
}

void PrefixTree::SetUnused(int32_t page) {
  Node& node = nodes_[Index(page)];
  ISOBIT_CHECK(node.in_tree && !node.unused) << "page " << page;
  node.unused = true;
  node.place = unused_.insert(unused_.end(), page);
}

void PrefixTree::SetUsed(int32_t page) {
  Node& node = nodes_[Index(page)];
  if (!node.unused) return;
  node.unused = false;
  unused_.erase(node.place);
}

void PrefixTree::Touch(absl::Span<const int32_t> path) {
  for (auto page = path.rbegin(); page != path.rend(); ++page) {
    const Node& node = nodes_[Index(*page)];
    if (node.unused) unused_.splice(unused_.end(), unused_, node.place);
    if (node.snapshot == kNoSlot) continue;
    snapshots_.splice(snapshots_.end(), snapshots_, node.snapshot_link);
  }
}

int32_t PrefixTree::TakeOldest() {
  const int32_t page = unused_.front();
  ISOBIT_CHECK(nodes_[Index(page)].children.empty())
      << "page " << page << " goes before what comes after it";
  Remove(page);
  return page;
}

std::vector<int32_t> PrefixTree::TakeAll() {
  std::vector<int32_t> unused(unused_.begin(), unused_.end());
  for (Node& node : nodes_) {
    DropSnapshot(node);
    if (node.in_tree) node = Node();
  }
  first_.clear();
  unused_.clear();
  return unused;
}

void PrefixTree::Remove(int32_t page) {
  Node& node = nodes_[Index(page)];
  Children& siblings = node.parent == kRoot ? first_ : nodes_[Index(node.parent)].children;
  siblings.erase(node.tokens);
  unused_.erase(node.place);
  DropSnapshot(node);
  node = Node();
}

void PrefixTree::SetSnapshot(int32_t page, int32_t slot) {
  Node& node = nodes_[Index(page)];
  ISOBIT_CHECK(node.in_tree && node.snapshot == kNoSlot) << "page " << page;
  node.snapshot = slot;
  node.snapshot_link = snapshots_.insert(snapshots_.end(), page);
}

bool PrefixTree::DropOldestSnapshot() {
  const auto unused = std::ranges::find_if(
      snapshots_, [this](int32_t page) { return !slots_.IsShared(SnapshotOf(page)); });
  if (unused == snapshots_.end()) return false;
  DropSnapshot(nodes_[Index(*unused)]);
  return true;
}

void PrefixTree::DropSnapshot(Node& node) {
  if (node.snapshot == kNoSlot) return;
  snapshots_.erase(node.snapshot_link);
  slots_.Release(std::exchange(node.snapshot, kNoSlot));
}

}  // namespace isobit
