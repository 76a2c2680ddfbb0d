// Where a text has before what a sequence ends with now, and what followed there. The text only
// grows at its end; adding a token and finding a place take constant time.
#ifndef ISOBIT_ROLLOUT_SUFFIX_INDEX_H_
#define ISOBIT_ROLLOUT_SUFFIX_INDEX_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace isobit {

// No token. Nothing is found across it.
inline constexpr int32_t kTextEnd = -1;

// Does not keep the text, which the caller passes to each call.
class SuffixIndex {
 public:
  static constexpr size_t kLeast = 3;  // equal tokens that make a place worth looking at
  static constexpr size_t kMost = 32;  // equal tokens that are counted

  // text[end] follows `length` tokens that are those of the suffix. length 0: nothing found.
  struct Place {
    size_t end = 0;
    size_t length = 0;
  };

  // Enters what has been appended to the text since the last call.
  void Extend(absl::Span<const int32_t> text);

  // Among the latest places of the text that end with the last kLeast tokens of `suffix`, the one
  // that shares most tokens with it; of several, the latest.
  Place Find(absl::Span<const int32_t> text, absl::Span<const int32_t> suffix) const;

  size_t bytes() const { return (heads_.capacity() + earlier_.capacity()) * sizeof(uint32_t); }

 private:
  static constexpr int kCandidates = 16;
  static constexpr uint32_t kNone = 0;

  size_t Bucket(absl::Span<const int32_t> text, size_t end) const;
  void Enter(absl::Span<const int32_t> text, size_t end);

  // A place is the position of the token that follows. Those whose preceding kLeast tokens have one
  // hash form a list, the latest first.
  std::vector<uint32_t> heads_;    // by hash; a power of two
  std::vector<uint32_t> earlier_;  // by place
};

// Follows a text as long as a sequence repeats it, and looks for another place when it does not.
class TextFollower {
 public:
  // tokens: of the sequence, which have grown since the last call. index: of all of `text`.
  void Advance(absl::Span<const int32_t> text, const SuffixIndex& index,
               absl::Span<const int32_t> tokens);
  // The place to be followed, with length 0 if there is none.
  const SuffixIndex::Place& place() const { return place_; }
  // Follows the text from text[end] on, which stands for the token behind the first `num_tokens`,
  // whatever else there is.
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

#endif  // ISOBIT_ROLLOUT_SUFFIX_INDEX_H_
