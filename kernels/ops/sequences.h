// The sequences of a step: which rows are theirs, and where their keys and values are.
#ifndef ISOBIT_KERNELS_OPS_SEQUENCES_H_
#define ISOBIT_KERNELS_OPS_SEQUENCES_H_

#include <cstdint>

#include "absl/types/span.h"

namespace isobit {

// Consecutive rows of a batch that are consecutive positions of one sequence: a whole prompt, or
// one or more tokens that follow those in the KV cache.
struct SequenceRows {
  int64_t first_row = 0;
  int64_t num_rows = 0;
  int64_t first_position = 0;
  const int32_t* pages = nullptr;  // page numbers for positions [0, first_position + num_rows)
};

// The sequences of an uploaded step. They cover the step's rows in order.
struct DeviceSequences;  // kernels/cuda/common/step_tables/sequences.h
struct SequenceTable {
  absl::Span<const SequenceRows> host;
  const DeviceSequences* device = nullptr;  // the CUDA backend's own copy; null elsewhere
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_OPS_SEQUENCES_H_
