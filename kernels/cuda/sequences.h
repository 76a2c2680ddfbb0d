// Uploads a step's tables, its ids and sequences (device/device_sequences.h), to GPU memory.
#ifndef ISOBIT_KERNELS_CUDA_SEQUENCES_H_
#define ISOBIT_KERNELS_CUDA_SEQUENCES_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/cuda/device/device_sequences.h"
#include "kernels/cuda/shared_splits.h"
#include "kernels/step_tables.h"

namespace isobit::cuda {

// What a step is padded to, so that one captured graph serves many steps. 0: no padding. A step
// that exceeds a bound takes what it needs.
struct StepBounds {
  int32_t num_rows = 0;
  int32_t num_sequences = 0;
  int32_t max_rows = 0;
  int32_t max_positions = 0;
  // This step may write positions below a sequence's first, in its other half or for another
  // sequence that shares the pages.
  bool writes_past = false;
  Sharing sharing = Sharing::kNever;
  int32_t kv_heads = 0;  // of the cache, for kWhereItPays
};

// Uploads a step's tables with one copy for each step.
//
// As long as the buffer does not grow, the addresses depend only on the padded numbers of rows and
// sequences. A graph captured after one Upload therefore reads, when replayed, the tables of the
// latest Upload with the same two numbers. `generation` changes when the buffer grows.
class StepTableUpload {
 public:
  StepTableUpload() = default;
  ~StepTableUpload();
  StepTableUpload(const StepTableUpload&) = delete;
  StepTableUpload& operator=(const StepTableUpload&) = delete;

  // Makes room for steps of up to this many rows, sequences and pages (of all sequences together).
  // Waits for the device if it has to grow. RESOURCE_EXHAUSTED: no memory.
  absl::Status Reserve(int64_t num_rows, int64_t num_sequences, int64_t num_pages);

  // Copies ids [rows] and the sequences, both in host memory, which may be reused on return. Ops of
  // `stream` before the copy still read the previous step's tables, ops after it these. The copy is
  // not for capture. Ids of padding rows are 0. Grows as Reserve does. INVALID_ARGUMENT: a position
  // beyond 2^31.
  absl::Status Upload(absl::Span<const int32_t> ids, absl::Span<const SequenceRows> sequences,
                      int32_t page_size, const StepBounds& bounds, cudaStream_t stream);

  const int32_t* ids() const { return ids_; }  // [num_rows], in GPU memory
  const DeviceSequences& device() const { return sequences_; }
  int64_t generation() const { return generation_; }
  size_t device_bytes() const { return capacity_ * sizeof(int32_t); }

 private:
  // Where each of a step's tables begins, in words.
  struct Layout;

  absl::Status Grow(size_t words);

  // A double buffer: the copy from one may still be in flight while the next step is written.
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

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SEQUENCES_H_
