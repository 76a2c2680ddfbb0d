// Finds where the end of a sequence occurred before in a text, and what followed there. The text
// only grows at its end; adding a token and finding a place take constant time.
#ifndef ISOBIT_ROLLOUT_GUESSES_SUFFIX_INDEX_H_
#define ISOBIT_ROLLOUT_GUESSES_SUFFIX_INDEX_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace isobit {

// Marks the end of a text; it is no token. No match extends across it.
inline constexpr int32_t kTextEnd = -1;

// Does not store the text; the caller passes it to each call.
class SuffixIndex {
 public:
  static constexpr size_t kLeast = 3;  // equal tokens that make a match
  static constexpr size_t kMost = 32;  // equal tokens that are counted

  // The `length` tokens before text[end] are the suffix's last ones. length 0: nothing was found.
  struct Place {
    size_t end = 0;
    size_t length = 0;
  };

  // Adds what has been appended to the text since the last call.
  void Extend(absl::Span<const int32_t> text);

  // Of the latest places in the text that follow the last kLeast tokens of `suffix`, the one with
  // the longest common suffix; if several are equally long, the latest.
  Place Find(absl::Span<const int32_t> text, absl::Span<const int32_t> suffix) const;

  size_t bytes() const { return (heads_.capacity() + earlier_.capacity()) * sizeof(uint32_t); }

 private:
  static constexpr int kCandidates = 16;
  static constexpr uint32_t kNone = 0;

  size_t Bucket(absl::Span<const int32_t> text, size_t end) const;
  void Enter(absl::Span<const int32_t> text, size_t end);

  // A place is the position of the token that follows. Places whose preceding kLeast tokens have
  // the same hash form a list, the latest first.
  std::vector<uint32_t> heads_;    // by hash; a power of two
  std::vector<uint32_t> earlier_;  // by place
};

// Follows a text as long as a sequence repeats it; when it no longer does, finds another place.
class TextFollower {
 public:
  // tokens: the sequence's, which have grown since the last call. index: of all of `text`.
  void Advance(absl::Span<const int32_t> text, const SuffixIndex& index,
               absl::Span<const int32_t> tokens);
  // The place that is followed; length 0: there is none.
  const SuffixIndex::Place& place() const { return place_; }
  // Follows the text from text[end] on, as a prediction of the tokens behind the first
  // `num_tokens`, even if other places match.
  void Follow(size_t end, size_t num_tokens) {
    place_ = {.end = end, .length = SuffixIndex::kMost};
    num_seen_ = num_tokens;
  }
  // Call when the text has been replaced.
  void Forget() { place_ = {}; }

 private:
  SuffixIndex::Place place_;
  size_t num_seen_ = 0;  // tokens
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_GUESSES_SUFFIX_INDEX_H_
