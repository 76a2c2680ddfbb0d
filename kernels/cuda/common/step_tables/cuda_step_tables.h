// The tables of a step on one GPU: those of the whole step and those of its halves.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_STEP_TABLES_CUDA_STEP_TABLES_H_
#define ISOBIT_KERNELS_CUDA_COMMON_STEP_TABLES_CUDA_STEP_TABLES_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/cuda/common/step_tables/sequences.h"
#include "kernels/step_tables.h"

namespace isobit {

class CudaStepTables final : public StepTables {
 public:
  // Copies on `stream` of GPU `device`.
  CudaStepTables(int device, cudaStream_t stream) : device_(device), stream_(stream) {}

  absl::StatusOr<UploadedStep> Upload(absl::Span<const int32_t> ids,
                                      absl::Span<const SequenceRows> sequences, int32_t page_size,
                                      bool writes_past) override {
    return UploadWithin(ids, sequences, page_size, {.writes_past = writes_past});
  }
  absl::StatusOr<SequenceTable> UploadHalf(int half, absl::Span<const SequenceRows> sequences,
                                           int32_t page_size) override;

  // Like Upload, padded to `bounds`, for a graph captured after a call with the same bounds.
  // Padding rows have id 0.
  absl::StatusOr<UploadedStep> UploadWithin(absl::Span<const int32_t> ids,
                                            absl::Span<const SequenceRows> sequences,
                                            int32_t page_size, const cuda::StepBounds& bounds);

  // Allocates room for steps of so many rows, sequences and pages, so that what Upload and
  // UploadHalf return keeps its address. RESOURCE_EXHAUSTED: there is no memory.
  absl::Status Reserve(int64_t rows, int64_t sequences, int64_t pages);
  size_t device_bytes() const {
    return step_.device_bytes() + halves_[0].device_bytes() + halves_[1].device_bytes();
  }

 private:
  const int device_;
  const cudaStream_t stream_;
  cuda::StepTableUpload step_;
  cuda::StepTableUpload halves_[2];
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_CUDA_COMMON_STEP_TABLES_CUDA_STEP_TABLES_H_
