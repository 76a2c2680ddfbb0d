// Chains of positions, by the hash of the tokens before them.
#include "rollout/guesses/suffix_index.h"

#include <algorithm>

namespace isobit {
namespace {

constexpr size_t kLeastHeads = 64;

}  // namespace

size_t SuffixIndex::Bucket(absl::Span<const int32_t> text, size_t end) const {
  uint64_t hash = 0;
  for (size_t i = end - kLeast; i < end; ++i) {
    hash = (hash ^ static_cast<uint32_t>(text[i])) * 0x9e3779b97f4a7c15u;
  }
  return static_cast<size_t>(hash >> 32) & (heads_.size() - 1);
}

void SuffixIndex::Enter(absl::Span<const int32_t> text, size_t end) {
  uint32_t& head = heads_[Bucket(text, end)];
  earlier_[end] = head;
  head = static_cast<uint32_t>(end);
}

void SuffixIndex::Extend(absl::Span<const int32_t> text) {
  size_t begin = std::max(earlier_.size(), kLeast);
  if (text.size() <= begin) return;
  earlier_.resize(text.size(), kNone);
  if (heads_.size() < text.size()) {
    size_t size = std::max(heads_.size(), kLeastHeads);
    while (size < text.size()) size *= 2;
    heads_.assign(size, kNone);
    begin = kLeast;
  }
  for (size_t end = begin; end < text.size(); ++end) Enter(text, end);
}

SuffixIndex::Place SuffixIndex::Find(absl::Span<const int32_t> text,
                                     absl::Span<const int32_t> suffix) const {
  Place best;
  if (heads_.empty() || suffix.size() < kLeast) return best;
  uint32_t end = heads_[Bucket(suffix, suffix.size())];
  for (int i = 0; i < kCandidates && end != kNone; ++i, end = earlier_[end]) {
    if (text[end] == kTextEnd) continue;
    const size_t most = std::min({kMost, suffix.size(), size_t{end}});
    size_t length = 0;
    while (length < most && text[end - 1 - length] == suffix[suffix.size() - 1 - length]) ++length;
    if (length >= kLeast && length > best.length) best = {end, length};
  }
  return best;
}

void TextFollower::Advance(absl::Span<const int32_t> text, const SuffixIndex& index,
                           absl::Span<const int32_t> tokens) {
  for (; num_seen_ < tokens.size() && place_.length > 0; ++num_seen_) {
    if (place_.end < text.size() && text[place_.end] == tokens[num_seen_]) {
      ++place_.end;
      ++place_.length;
    } else {
      place_ = {};
    }
  }
  num_seen_ = tokens.size();
  if (place_.end >= text.size() || text[place_.end] == kTextEnd) place_ = {};
  if (place_.length >= SuffixIndex::kMost) return;
  const SuffixIndex::Place found = index.Find(text, tokens);
  if (found.length > place_.length) place_ = found;
}

}  // namespace isobit
