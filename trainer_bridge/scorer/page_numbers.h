// Numbers the KV pages of waiting sequences: if two sequences begin with the same tokens, their
// pages of these tokens have the same numbers.
#ifndef ISOBIT_TRAINER_BRIDGE_SCORER_PAGE_NUMBERS_H_
#define ISOBIT_TRAINER_BRIDGE_SCORER_PAGE_NUMBERS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "absl/hash/hash.h"
#include "trainer_bridge/scorer/score_job.h"

namespace isobit {

// Tokens in a KV page of the scorer. Sequences share whole pages, so with smaller pages fewer
// tokens are computed twice. Prefill attention on GPUs copies fastest in multiples of 8.
inline constexpr int64_t kScorePageSize = 16;

class PageNumbers {
 public:
  // sharing: if false, every page gets a number of its own.
  explicit PageNumbers(bool sharing) : sharing_(sharing) {}

  // The numbers of the sequence's pages, in order. A full page gets the number of an earlier
  // sequence's page if both sequences have the same tokens up to its end. Every other page is new:
  // new pages are numbered in order, from count() on, and come after all others.
  std::vector<int32_t> Add(const ScoreInput& input);

  int32_t count() const { return count_; }

 private:
  // A full page's tokens. The number of the page before it identifies all tokens before.
  struct Page {
    int32_t before;  // -1: none
    std::array<int32_t, kScorePageSize> tokens;

    bool operator==(const Page&) const = default;
    template <class Hash>
    friend Hash AbslHashValue(Hash hash, const Page& page) {
      return Hash::combine(std::move(hash), page.before, page.tokens);
    }
  };

  const bool sharing_;
  int32_t count_ = 0;
  std::unordered_map<Page, int32_t, absl::Hash<Page>> numbers_;
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_PAGE_NUMBERS_H_
