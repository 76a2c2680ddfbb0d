// Where a step is cut.
#include "kernels/blocks/step_halves.h"

#include <algorithm>

namespace isobit {
namespace {

constexpr int64_t kTile = 128;  // rows that a matrix product takes at once

// Rows of the first half: whole tiles, if the step has at least two.
int64_t RowsOfFirstHalf(int64_t rows) {
  return rows < 2 * kTile ? rows / 2 : (rows + kTile) / (2 * kTile) * kTile;
}

// The rows of a sequence that lie in [begin, end), counted from `begin`.
SequenceRows CutRows(const SequenceRows& s, int64_t begin, int64_t end) {
  const int64_t first = std::max(s.first_row, begin);
  SequenceRows cut_rows = s;
  cut_rows.first_row = first - begin;
  cut_rows.num_rows = std::min(s.first_row + s.num_rows, end) - first;
  cut_rows.first_position += first - s.first_row;
  const int32_t slot_at_cut = s.to_slot == kNoSlot ? kCutSlot : s.to_slot;
  if (first > s.first_row) cut_rows.from_slot = slot_at_cut;
  if (end < s.first_row + s.num_rows) cut_rows.to_slot = slot_at_cut;
  return cut_rows;
}

}  // namespace

StepHalves CutStep(absl::Span<const SequenceRows> sequences) {
  const int64_t rows =
      sequences.empty() ? 0 : sequences.back().first_row + sequences.back().num_rows;
  const int64_t cut = RowsOfFirstHalf(rows);
  StepHalves halves;
  halves.half[0].num_rows = cut;
  halves.half[1].first_row = cut;
  halves.half[1].num_rows = rows - cut;
  for (StepHalf& half : halves.half) {
    for (const SequenceRows& s : sequences) {
      const SequenceRows cut_rows = CutRows(s, half.first_row, half.first_row + half.num_rows);
      if (cut_rows.num_rows > 0) half.sequences.push_back(cut_rows);
    }
  }
  return halves;
}

int64_t MostRowsOfHalf(int64_t rows) { return std::min(rows, (rows + 1) / 2 + kTile / 2); }

}  // namespace isobit
