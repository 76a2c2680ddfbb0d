// The sequences of a step: which rows are theirs, and where what is kept of their past is.
#ifndef ISOBIT_KERNELS_OPS_SEQUENCES_H_
#define ISOBIT_KERNELS_OPS_SEQUENCES_H_

#include <cstdint>

#include "absl/types/span.h"

namespace isobit {

inline constexpr int32_t kNoSlot = -1;
// Holds a sequence's state while a step is computed in halves that cut it. Not to be handed out.
inline constexpr int32_t kCutSlot = 0;

// Consecutive rows of a batch that are consecutive positions of one sequence: a whole prompt, or
// one or more tokens that follow those in the KV cache. A sequence may be cut into several of
// these, one after the other, and has the same bits.
struct SequenceRows {
  int64_t first_row = 0;
  int64_t num_rows = 0;
  int64_t first_position = 0;
  const int32_t* pages = nullptr;  // page numbers for positions [0, first_position + num_rows)
  // In a model with slots: the slot that holds the state before the first row, and the one that
  // takes the state behind the last row. They may be the same.
  int32_t from_slot = kNoSlot;  // kNoSlot: the sequence begins here
  int32_t to_slot = kNoSlot;    // kNoSlot: nobody will read it
};

// The sequences of an uploaded step. They cover the step's rows in order. In one step a slot has at
// most one writer; whoever else reads it comes later.
struct DeviceSequences;  // kernels/cuda/common/step_tables/sequences.h
struct SequenceTable {
  absl::Span<const SequenceRows> host;
  const DeviceSequences* device = nullptr;  // the CUDA backend's own copy; null elsewhere
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_OPS_SEQUENCES_H_
