// A step's sequences in GPU memory, as the kernels that follow page tables read them. Not here: how
// they get there (sequences.h).
#ifndef ISOBIT_KERNELS_CUDA_DEVICE_DEVICE_SEQUENCES_H_
#define ISOBIT_KERNELS_CUDA_DEVICE_DEVICE_SEQUENCES_H_

#include <cstdint>

namespace isobit {

// Passed by value; the arrays are in GPU memory. Sequence s holds rows [first_row[s],
// first_row[s+1]) at positions from first_position[s]; position p lies in page pages[first_page[s]
// + p / page_size]. A sequence of no rows is padding. A replayed graph reads what the arrays hold
// then, so the bounds may be looser than what they bound. Nothing but a copy between two steps may
// write the arrays: kernels read them before WaitForPredecessor.
//
// If past_is_written, attention reads before it, too, the keys and values of positions below
// first_position: earlier steps wrote them, the copy came after those steps, and no kernel of this
// step writes them. INVARIANT: attention_front_test, WaitsForThisStepsRows.
struct DeviceSequences {
  const int32_t* first_row = nullptr;       // [num_sequences + 1]
  const int32_t* first_position = nullptr;  // [num_sequences]
  const int32_t* first_page = nullptr;      // [num_sequences]
  const int32_t* pages = nullptr;
  const int32_t* sequence_of_row = nullptr;  // [num_rows]; -1: a row of padding, of no sequence
  int32_t num_sequences = 0;
  int32_t num_rows = 0;          // of all sequences, and padding
  int32_t min_rows = 0;          // least rows of a sequence that has any (at most)
  int32_t max_rows = 0;          // bound on the rows of one sequence
  int32_t max_positions = 0;     // bound on first_position + rows of one sequence
  bool past_is_written = false;  // positions below first_position, by earlier steps
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_CUDA_DEVICE_DEVICE_SEQUENCES_H_
