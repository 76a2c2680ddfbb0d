// Assigns rows, pages and slots to sequences.
#include "trainer_bridge/scorer/packed_pass.h"

#include <algorithm>
#include <map>
#include <utility>

#include "trainer_bridge/scorer/page_numbers.h"

namespace isobit {
namespace {

void AppendFrom(const std::vector<int32_t>& tokens, size_t first, std::vector<int32_t>& to) {
  if (first < tokens.size()) {
    to.insert(to.end(), tokens.begin() + static_cast<int64_t>(first), tokens.end());
  }
}

}  // namespace

PackedPass::PackedPass(absl::Span<const ScoreItem> items, bool sharing, bool has_slots) {
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
  if (has_slots) CutForSlots();
}

void PackedPass::CutForSlots() {
  const auto last_page_before = [](const SequenceRows& rows) {
    return rows.pages[rows.first_position / kScorePageSize - 1];
  };
  std::map<int32_t, int32_t> slots;  // by page: the state behind it
  for (const SequenceRows& rows : batch_.sequences) {
    if (rows.first_position == 0) continue;
    if (slots.try_emplace(last_page_before(rows), num_slots_ + 1).second) ++num_slots_;
  }
  std::vector<SequenceRows> cut;
  for (SequenceRows rest : batch_.sequences) {
    if (rest.first_position > 0) rest.from_slot = slots.at(last_page_before(rest));
    const int64_t end = rest.first_position + rest.num_rows;
    for (int64_t next = rest.first_position + kScorePageSize; next <= end; next += kScorePageSize) {
      const auto slot = slots.find(rest.pages[next / kScorePageSize - 1]);
      if (slot == slots.end()) continue;
      SequenceRows rows = rest;
      rows.num_rows = next - rest.first_position;
      rows.to_slot = rest.from_slot = slot->second;
      rest.first_row += rows.num_rows;
      rest.first_position = next;
      rest.num_rows = end - next;
      cut.push_back(rows);
    }
    if (rest.num_rows > 0) cut.push_back(rest);
  }
  batch_.sequences = std::move(cut);
}

int64_t PackedPass::RowOf(size_t item, int64_t position) const {
  const int32_t page = pages_[first_page_[item] + static_cast<size_t>(position / kScorePageSize)];
  return row_of_page_[static_cast<size_t>(page)] + position % kScorePageSize;
}

}  // namespace isobit
