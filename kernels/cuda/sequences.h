// A step's sequences in GPU memory, for the kernels that follow page tables.
#ifndef ISOBIT_KERNELS_CUDA_SEQUENCES_H_
#define ISOBIT_KERNELS_CUDA_SEQUENCES_H_

#include <cstdint>

namespace isobit {

// Passed by value; the arrays are in GPU memory. Sequence s holds rows [first_row[s],
// first_row[s+1]) at positions from first_position[s]; position p lies in page pages[first_page[s]
// + p / page_size]. A sequence of no rows is padding. A replayed graph reads what the arrays hold
// then, so the three bounds may be larger than what they bound.
struct DeviceSequences {
  const int32_t* first_row = nullptr;       // [num_sequences + 1]
  const int32_t* first_position = nullptr;  // [num_sequences]
  const int32_t* first_page = nullptr;      // [num_sequences]
  const int32_t* pages = nullptr;
  const int32_t* sequence_of_row = nullptr;  // [num_rows]
  int32_t num_sequences = 0;
  int32_t num_rows = 0;       // of all sequences
  int32_t max_rows = 0;       // bound on the rows of one sequence
  int32_t max_positions = 0;  // bound on first_position + rows of one sequence
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_CUDA_SEQUENCES_H_
