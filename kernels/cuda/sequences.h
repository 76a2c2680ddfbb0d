// A step's sequences in GPU memory, for the kernels that follow page tables.
#ifndef ISOBIT_KERNELS_CUDA_SEQUENCES_H_
#define ISOBIT_KERNELS_CUDA_SEQUENCES_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/ops.h"

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

namespace cuda {

// What a step is padded to, so that one captured graph serves many steps: 0 is what the step needs.
// A step that exceeds a bound takes what it needs.
struct StepBounds {
  int32_t num_rows = 0;
  int32_t num_sequences = 0;
  int32_t max_rows = 0;
  int32_t max_positions = 0;
  bool part_of_step = false;  // another part of the same step may write what this one reads
};

// Brings what a step is about into GPU memory, with one copy a step.
//
// The addresses depend on nothing but the padded numbers of rows and sequences as long as the
// buffer does not grow: a graph captured after one Stage reads, when replayed, what a later Stage
// with the same two numbers brought. `generation` tells when the buffer has grown.
class SequenceStage {
 public:
  SequenceStage() = default;
  ~SequenceStage();
  SequenceStage(const SequenceStage&) = delete;
  SequenceStage& operator=(const SequenceStage&) = delete;

  // Makes room for steps of up to this many rows, sequences and pages (of all sequences together).
  // Waits for the device if it has to grow. RESOURCE_EXHAUSTED: no memory.
  absl::Status Reserve(int64_t num_rows, int64_t num_sequences, int64_t num_pages);

  // Copies ids [rows] and the sequences, both in host memory and free to be reused on return.
  // Ops of `stream` before the copy still read the step before, ops after it this one; the copy is
  // not for capture. Ids of padding rows are 0. Grows as Reserve does. INVALID_ARGUMENT: a position
  // beyond 2^31.
  absl::Status Stage(absl::Span<const int32_t> ids, absl::Span<const SequenceRows> sequences,
                     int32_t page_size, const StepBounds& bounds, cudaStream_t stream);

  const int32_t* ids() const { return ids_; }  // [num_rows], in GPU memory
  const DeviceSequences& device() const { return sequences_; }
  int64_t generation() const { return generation_; }

 private:
  // Words of a step's tables, and where each begins.
  struct Layout;

  absl::Status Grow(size_t words);

  // Two buffers in turn: the copy out of one may still be under way while the next step is written.
  struct PinnedBuffer {
    int32_t* words = nullptr;
    cudaEvent_t copied = nullptr;
  };
  PinnedBuffer pinned_[2];
  int turn_ = 0;
  int32_t* device_words_ = nullptr;
  size_t capacity_ = 0;  // words
  int64_t generation_ = 0;

  const int32_t* ids_ = nullptr;
  DeviceSequences sequences_;
};

}  // namespace cuda
}  // namespace isobit

#endif  // ISOBIT_KERNELS_CUDA_SEQUENCES_H_
