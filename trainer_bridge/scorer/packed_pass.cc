// Assigns rows and pages to sequences.
#include "trainer_bridge/scorer/packed_pass.h"

#include <algorithm>

#include "trainer_bridge/scorer/page_numbers.h"

namespace isobit {
namespace {

void AppendFrom(const std::vector<int32_t>& tokens, size_t first, std::vector<int32_t>& to) {
  if (first < tokens.size()) {
    to.insert(to.end(), tokens.begin() + static_cast<int64_t>(first), tokens.end());
  }
}

}  // namespace

PackedPass::PackedPass(absl::Span<const ScoreItem> items, bool sharing) {
  PageNumbers numbers(sharing);
  std::vector<size_t> table_of_sequence;  // the first page of each sequence of the batch, in pages_
  for (const ScoreItem& item : items) {
    const ScoreInput& input = item.input();
    const int32_t num_known = numbers.count();
    const std::vector<int32_t> pages = numbers.Add(input);
    const auto first_new =
        std::find_if(pages.begin(), pages.end(), [=](int32_t page) { return page >= num_known; });
    const int64_t first_position = (first_new - pages.begin()) * kScorePageSize;
    const int64_t first_row = num_rows();
    for (auto page = first_new; page != pages.end(); ++page) {
      row_of_page_.push_back(first_row + (page - first_new) * kScorePageSize);
    }
    if (first_new != pages.end()) {
      batch_.sequences.push_back({.first_row = first_row,
                                  .num_rows = input.num_tokens() - first_position,
                                  .first_position = first_position});
      table_of_sequence.push_back(pages_.size());
      // INVARIANT: PackedPassTest.SaysThatTheStepWritesWhatItsSequencesRead.
      batch_.writes_past = batch_.writes_past || first_position > 0;
      const auto first = static_cast<size_t>(first_position);
      AppendFrom(input.prompt, first, batch_.ids);
      AppendFrom(input.completion, first - std::min(first, input.prompt.size()), batch_.ids);
    }
    first_page_.push_back(pages_.size());
    pages_.insert(pages_.end(), pages.begin(), pages.end());
  }
  for (size_t s = 0; s < batch_.sequences.size(); ++s) {
    batch_.sequences[s].pages = pages_.data() + table_of_sequence[s];
  }
}

int64_t PackedPass::RowOf(size_t item, int64_t position) const {
  const int32_t page = pages_[first_page_[item] + static_cast<size_t>(position / kScorePageSize)];
  return row_of_page_[static_cast<size_t>(page)] + position % kScorePageSize;
}

}  // namespace isobit
