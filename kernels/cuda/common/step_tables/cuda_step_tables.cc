// The uploads of a step and of its halves.
#include "kernels/cuda/common/step_tables/cuda_step_tables.h"

#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"

namespace isobit {

absl::StatusOr<UploadedStep> CudaStepTables::UploadWithin(absl::Span<const int32_t> ids,
                                                          absl::Span<const SequenceRows> sequences,
                                                          int32_t page_size,
                                                          const cuda::StepBounds& bounds) {
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaSetDevice(device_));
  ISOBIT_RETURN_IF_ERROR(step_.Upload(ids, sequences, page_size, bounds, stream_));
  return UploadedStep{step_.ids(), {sequences, &step_.device()}};
}

absl::StatusOr<SequenceTable> CudaStepTables::UploadHalf(int half,
                                                         absl::Span<const SequenceRows> sequences,
                                                         int32_t page_size) {
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaSetDevice(device_));
  cuda::StepTableUpload& upload = halves_[half];
  ISOBIT_RETURN_IF_ERROR(upload.Upload({}, sequences, page_size, {.writes_past = true}, stream_));
  return SequenceTable{sequences, &upload.device()};
}

absl::Status CudaStepTables::Reserve(int64_t rows, int64_t sequences, int64_t pages) {
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaSetDevice(device_));
  for (cuda::StepTableUpload& upload : halves_) {
    ISOBIT_RETURN_IF_ERROR(upload.Reserve(rows, sequences, pages));
  }
  return step_.Reserve(rows, sequences, pages);
}

}  // namespace isobit
