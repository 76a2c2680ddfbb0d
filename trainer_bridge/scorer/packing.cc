// Greedy packing, then balancing. See packing.h.
#include "trainer_bridge/scorer/packing.h"

#include <algorithm>
#include <numeric>

namespace isobit {
namespace {

// Gives sequences to ranks, each to the one with the fewest tokens.
class Bins {
 public:
  Bins(int num_ranks, int64_t max_tokens)
      : max_tokens_(max_tokens),
        tokens_(static_cast<size_t>(num_ranks)),
        ranks_(static_cast<size_t>(num_ranks)) {}

  // False, and nothing changes, if the emptiest rank has no room.
  bool Add(size_t sequence, int64_t length) {
    const auto emptiest = std::min_element(tokens_.begin(), tokens_.end());
    if (*emptiest > 0 && *emptiest + length > max_tokens_) return false;
    *emptiest += length;
    ranks_[static_cast<size_t>(emptiest - tokens_.begin())].push_back(sequence);
    return true;
  }

  std::vector<std::vector<size_t>> TakeRanks() { return std::move(ranks_); }

 private:
  const int64_t max_tokens_;
  std::vector<int64_t> tokens_;
  std::vector<std::vector<size_t>> ranks_;
};

}  // namespace

PackedBatch PackBatch(absl::Span<const int64_t> lengths, int num_ranks, int64_t max_batch_tokens) {
  PackedBatch batch;
  Bins in_order(num_ranks, max_batch_tokens);
  while (batch.count < lengths.size() && in_order.Add(batch.count, lengths[batch.count])) {
    ++batch.count;
  }

  // The pass lasts as long as its fullest rank: longest first balances better, but may not fit.
  std::vector<size_t> longest_first(batch.count);
  std::iota(longest_first.begin(), longest_first.end(), size_t{0});
  std::stable_sort(longest_first.begin(), longest_first.end(),
                   [&](size_t a, size_t b) { return lengths[a] > lengths[b]; });
  Bins balanced(num_ranks, max_batch_tokens);
  const bool fits = std::all_of(longest_first.begin(), longest_first.end(),
                                [&](size_t s) { return balanced.Add(s, lengths[s]); });
  batch.ranks = fits ? balanced.TakeRanks() : in_order.TakeRanks();
  for (std::vector<size_t>& rank : batch.ranks) std::sort(rank.begin(), rank.end());
  return batch;
}

}  // namespace isobit
