// Runs of sequences whose page tables begin alike.
#include "kernels/cuda/common/step_tables/shared_splits.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "common/base/round_up.h"
#include "kernels/contract/constants.h"

namespace isobit::cuda {
namespace {

// The leading splits that two neighbours share.
int32_t SharedByTwo(const SequenceRows& a, const SequenceRows& b, int32_t page_size) {
  if (a.num_rows != 1 || b.num_rows != 1) return 0;
  const int64_t most = std::min(a.first_position, b.first_position) / contract::kSplit;
  const int64_t pages = CeilDiv(most * contract::kSplit, page_size);
  // One comparison of all pages is the quick way: most neighbours share all or not even the first.
  if (most == 0 || a.pages[0] != b.pages[0]) return 0;
  if (std::memcmp(a.pages, b.pages, static_cast<size_t>(pages) * sizeof(int32_t)) == 0) {
    return static_cast<int32_t>(most);
  }
  const int64_t same = std::mismatch(a.pages, a.pages + pages, b.pages).first - a.pages;
  return static_cast<int32_t>(same * page_size / contract::kSplit);
}

// Splits [first_split, end_split) of the run that began at first_sequence and still goes on.
struct OpenRun {
  int32_t first_sequence;
  int32_t first_split;
  int32_t end_split;
};

}  // namespace

int64_t FindSharedSplits(absl::Span<const SequenceRows> sequences, int32_t page_size,
                         absl::Span<int32_t> own_split, absl::Span<SharedSplits> groups) {
  std::fill(own_split.begin(), own_split.end(), 0);
  std::fill(groups.begin(), groups.end(), SharedSplits{});
  const auto n = static_cast<int32_t>(sequences.size());
  std::vector<OpenRun> open;  // their splits follow one another; the last began last
  int64_t saved = 0;
  size_t next = 0;
  int32_t before = 0;  // splits shared with the sequence before
  for (int32_t s = 0; s < n; ++s) {
    const auto at = static_cast<size_t>(s);
    if (s % kSharingWindow == 0) next = at;
    const bool alone = s + 1 == n || (s + 1) % kSharingWindow == 0;
    const int32_t after = alone ? 0 : SharedByTwo(sequences[at], sequences[at + 1], page_size);
    own_split[at] = std::max(before, after);
    // The runs of the splits from `after` on end here.
    while (!open.empty() && open.back().end_split > after) {
      OpenRun& run = open.back();
      const int32_t first_split = std::max(run.first_split, after);
      const int32_t count = s - run.first_sequence + 1;
      groups[next++] = {run.first_sequence, count, first_split, run.end_split};
      saved += int64_t{count - 1} * (run.end_split - first_split);
      run.end_split = first_split;
      if (run.end_split == run.first_split) open.pop_back();
    }
    const int32_t covered = open.empty() ? 0 : open.back().end_split;
    if (after > covered) open.push_back({s, covered, after});
    before = after;
  }
  return saved;
}

}  // namespace isobit::cuda
