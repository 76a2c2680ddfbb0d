// A step's sequences in GPU memory, for kernels to read. Not here: how they get there
// (step_tables/sequences.h).
#ifndef ISOBIT_KERNELS_CUDA_COMMON_DEVICE_DEVICE_SEQUENCES_H_
#define ISOBIT_KERNELS_CUDA_COMMON_DEVICE_DEVICE_SEQUENCES_H_

#include <cstdint>

namespace isobit {

// Consecutive sequences of one row each whose keys and values in splits [first_split, end_split)
// are in the same memory (step_tables/shared_splits.h). num_sequences 0: there are none.
struct alignas(16) SharedSplits {
  int32_t first_sequence = 0;
  int32_t num_sequences = 0;
  int32_t first_split = 0;
  int32_t end_split = 0;
};

// A group of sequences that share splits never crosses a multiple of so many sequences.
inline constexpr int32_t kSharingWindow = 768;

// Passed by value; the arrays are in GPU memory. Sequence s has rows [first_row[s], first_row[s+1])
// at positions from first_position[s]; position p is in page pages[first_page[s] + p / page_size].
// A sequence without rows is padding. A replayed graph reads the content that the arrays have at
// that time, so the bounds may be looser than needed. Only a copy between two steps may write the
// arrays, because kernels read them before WaitForPredecessor.
//
// If past_is_written, attention also reads keys and values at positions below first_position before
// WaitForPredecessor: earlier steps wrote them, the copy came after those steps, and no kernel of
// this step writes them, not even for another sequence that shares their pages.
// INVARIANT: attention_front_test, WaitsForThisStepsRows.
struct DeviceSequences {
  const int32_t* first_row = nullptr;       // [num_sequences + 1]
  const int32_t* first_position = nullptr;  // [num_sequences]
  const int32_t* first_page = nullptr;      // [num_sequences]
  const int32_t* pages = nullptr;
  const int32_t* sequence_of_row = nullptr;  // [num_rows]; -1: padding, which has no sequence
  // Which splits sequences share, with at most one group for each sequence, and each sequence's
  // first split that no group computes. Only the launches that `shares` selects read them.
  const SharedSplits* groups = nullptr;  // [num_sequences]
  const int32_t* own_split = nullptr;    // [num_sequences]
  int32_t num_sequences = 0;
  int32_t num_rows = 0;          // of all sequences, and padding
  int32_t min_rows = 0;          // lower bound on the rows of a sequence that has any
  int32_t max_rows = 0;          // upper bound on the rows of one sequence
  int32_t max_positions = 0;     // upper bound on first_position + rows of one sequence
  bool past_is_written = false;  // earlier steps wrote all positions below first_position
  bool shares = false;  // attention computes a group's splits once; else for every sequence
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_CUDA_COMMON_DEVICE_DEVICE_SEQUENCES_H_
