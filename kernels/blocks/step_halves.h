// Divides a large step into two halves, so that the sums of one half travel between ranks while the
// other is computed. Rows are independent, and a prompt may be divided anywhere without changing a
// bit (docs/NUMERICS.md), so this affects only speed; but all ranks must divide alike.
#ifndef ISOBIT_KERNELS_BLOCKS_STEP_HALVES_H_
#define ISOBIT_KERNELS_BLOCKS_STEP_HALVES_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/step_tables.h"

namespace isobit {

struct StepHalf {
  int64_t first_row = 0;  // index in the step
  int64_t num_rows = 0;
  std::vector<SequenceRows> sequences;  // their rows count from first_row
};

struct StepHalves {
  StepHalf half[2];
};

// Divides a step of at least two rows, which the sequences cover in order. A sequence may continue
// in the second half, where it reads what its rows in the first have left in pages and slots.
StepHalves CutStep(absl::Span<const SequenceRows> sequences);

// The largest possible half of a step of up to `rows` rows.
int64_t MostRowsOfHalf(int64_t rows);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_BLOCKS_STEP_HALVES_H_
