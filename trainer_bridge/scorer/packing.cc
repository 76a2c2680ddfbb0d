// Greedy packing, then balancing. See packing.h.
#include "trainer_bridge/scorer/packing.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "trainer_bridge/scorer/page_numbers.h"

namespace isobit {
namespace {

// What one rank has so far.
class Bin {
 public:
  explicit Bin(size_t num_pages) : has_page_(num_pages) {}

  // Tokens that the sequence adds to what the rank computes.
  int64_t CostOf(const WaitingSequence& sequence) const {
    // A page comes with all pages before it.
    const auto first_new =
        std::partition_point(sequence.pages.begin(), sequence.pages.end(),
                             [this](int32_t page) { return has_page_[static_cast<size_t>(page)]; });
    return sequence.tokens - (first_new - sequence.pages.begin()) * kScorePageSize;
  }

  void Add(size_t index, const WaitingSequence& sequence, int64_t cost) {
    rows_ += cost;
    scored_ += sequence.scored;
    for (const int32_t page : sequence.pages) has_page_[static_cast<size_t>(page)] = true;
    sequences_.push_back(index);
  }

  int64_t rows() const { return rows_; }
  int64_t scored() const { return scored_; }
  std::vector<size_t>& sequences() { return sequences_; }

 private:
  std::vector<bool> has_page_;  // by number
  int64_t rows_ = 0;
  int64_t scored_ = 0;
  std::vector<size_t> sequences_;
};

// Gives sequences to ranks, each to the one that it costs least.
class Bins {
 public:
  Bins(int num_ranks, size_t num_pages, int64_t max_rows, int64_t max_scored)
      : max_rows_(max_rows),
        max_scored_(max_scored),
        bins_(static_cast<size_t>(num_ranks), Bin(num_pages)) {}

  // False, and nothing changes, if no rank has room.
  bool Add(size_t index, const WaitingSequence& sequence) {
    Bin* best = nullptr;
    int64_t best_cost = 0;
    for (Bin& bin : bins_) {
      const int64_t cost = bin.CostOf(sequence);
      const bool fits = bin.rows() == 0 || (bin.rows() + cost <= max_rows_ &&
                                            bin.scored() + sequence.scored <= max_scored_);
      if (!fits) continue;
      if (best == nullptr || cost < best_cost || (cost == best_cost && bin.rows() < best->rows())) {
        best = &bin;
        best_cost = cost;
      }
    }
    if (best == nullptr) return false;
    best->Add(index, sequence, best_cost);
    return true;
  }

  void MoveTo(PackedBatch& batch) {
    for (Bin& bin : bins_) {
      batch.rows += bin.rows();
      batch.ranks.push_back(std::move(bin.sequences()));
      std::sort(batch.ranks.back().begin(), batch.ranks.back().end());
    }
  }

 private:
  const int64_t max_rows_;
  const int64_t max_scored_;
  std::vector<Bin> bins_;
};

// All sequences of a batch, longest first, under the least limit of a rank's tokens that works.
std::optional<Bins> Balance(absl::Span<const WaitingSequence> sequences, int num_ranks,
                            size_t num_pages, int64_t max_batch_tokens) {
  // The pass lasts as long as its fullest rank: longest first balances better, but may not fit.
  std::vector<size_t> longest_first(sequences.size());
  std::iota(longest_first.begin(), longest_first.end(), size_t{0});
  std::stable_sort(longest_first.begin(), longest_first.end(),
                   [&](size_t a, size_t b) { return sequences[a].tokens > sequences[b].tokens; });
  std::vector<bool> seen(num_pages);
  int64_t num_shared = 0;  // pages that sequences have in common
  int64_t rows = 0;        // of all ranks, if none computed what another does
  int64_t longest = 0;
  for (const WaitingSequence& sequence : sequences) {
    rows += sequence.tokens;
    longest = std::max(longest, sequence.tokens);
    for (const int32_t page : sequence.pages) {
      num_shared += seen[static_cast<size_t>(page)] ? 1 : 0;
      seen[static_cast<size_t>(page)] = true;
    }
  }
  rows -= num_shared * kScorePageSize;
  int64_t low = std::min(std::max(rows / num_ranks, longest), max_batch_tokens);
  int64_t high = max_batch_tokens;
  if (num_shared == 0) low = high;  // each goes to the emptiest rank, whatever the limit
  std::optional<Bins> best;
  while (low <= high) {
    const int64_t limit = low + (high - low) / 2;
    Bins bins(num_ranks, num_pages, limit, max_batch_tokens);
    if (std::all_of(longest_first.begin(), longest_first.end(),
                    [&](size_t s) { return bins.Add(s, sequences[s]); })) {
      best.emplace(std::move(bins));
      high = limit - 1;
    } else {
      low = limit + 1;
    }
  }
  return best;
}

}  // namespace

PackedBatch PackBatch(absl::Span<const WaitingSequence> sequences, int num_ranks,
                      int64_t max_batch_tokens) {
  size_t num_pages = 0;
  for (const WaitingSequence& sequence : sequences) {
    for (const int32_t page : sequence.pages) {
      num_pages = std::max(num_pages, static_cast<size_t>(page) + 1);
    }
  }
  PackedBatch batch;
  Bins in_order(num_ranks, num_pages, max_batch_tokens, max_batch_tokens);
  while (batch.count < sequences.size() && in_order.Add(batch.count, sequences[batch.count])) {
    ++batch.count;
  }
  std::optional<Bins> balanced =
      Balance(sequences.first(batch.count), num_ranks, num_pages, max_batch_tokens);
  (balanced ? *balanced : in_order).MoveTo(batch);
  return batch;
}

}  // namespace isobit
