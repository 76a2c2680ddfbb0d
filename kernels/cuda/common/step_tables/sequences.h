// Copies a step's tables to GPU memory: ids, and sequences (device_sequences.h).
#ifndef ISOBIT_KERNELS_CUDA_COMMON_STEP_TABLES_SEQUENCES_H_
#define ISOBIT_KERNELS_CUDA_COMMON_STEP_TABLES_SEQUENCES_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/cuda/common/device/device_sequences.h"
#include "kernels/cuda/common/step_tables/shared_splits.h"
#include "kernels/step_tables.h"

namespace isobit::cuda {

// The sizes to which a step is padded, so that one captured graph serves many steps. 0: no padding.
// A step that exceeds a bound is not cut off; it uses its own size.
struct StepBounds {
  int32_t num_rows = 0;
  int32_t num_sequences = 0;
  int32_t max_rows = 0;
  int32_t max_positions = 0;
  // Whether this step may write positions below a sequence's first one, in its other half or for
  // another sequence that shares the pages.
  bool writes_past = false;
  Sharing sharing = Sharing::kNever;
  int32_t kv_heads = 0;  // of the cache, for kWhereItPays
};

// Uploads a step's tables, by one copy per step.
//
// While the buffer does not grow, addresses depend only on the padded numbers of rows and
// sequences. So a graph captured after an Upload reads, when replayed, the tables of the latest
// Upload with the same two numbers. `generation` changes when the buffer grows.
class StepTableUpload {
 public:
  StepTableUpload() = default;
  ~StepTableUpload();
  StepTableUpload(const StepTableUpload&) = delete;
  StepTableUpload& operator=(const StepTableUpload&) = delete;

  // Allocates room for steps of up to so many rows, sequences and pages (of all sequences
  // together). If it has to grow, it waits for the device. RESOURCE_EXHAUSTED: there is no memory.
  absl::Status Reserve(int64_t num_rows, int64_t num_sequences, int64_t num_pages);

  // Copies ids [rows] and sequences; both are in host memory that may be reused on return. Ops on
  // `stream` before the copy still read the previous step's tables, ops after it read these. The
  // copy cannot be captured. Ids of padding rows are 0. Grows as Reserve does. INVALID_ARGUMENT: a
  // position exceeds 2^31.
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

#endif  // ISOBIT_KERNELS_CUDA_COMMON_STEP_TABLES_SEQUENCES_H_
