// The CUDA backend: one tensor-parallel rank's ops on one GPU, with the CPU backend's bits.
#ifndef ISOBIT_KERNELS_CUDA_CUDA_OPS_H_
#define ISOBIT_KERNELS_CUDA_CUDA_OPS_H_

#include <cstddef>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/config/numerics_mode.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/sequences.h"
#include "kernels/ops.h"

namespace isobit {

struct CudaOptions {
  int device = 0;
  // kVanilla packs weights for cuBLAS and multiplies with it; the other ops are the same in all
  // modes.
  NumericsMode mode = NumericsMode::kTree;
};

// Ops run in order on a stream of their own. Use the object from one thread at a time. Scratch that
// an op has used stays allocated, since a captured graph may still use it.
class CudaOps : public Ops {
 public:
  virtual const cuda::Stream& stream() const = 0;

  // Bytes that Allocate has given out, and that the ops hold as scratch. Any thread.
  virtual size_t allocated_bytes() const = 0;

  // Ops::Stage, padded to `bounds`, for a graph that was captured after such a call with the same
  // bounds. Rows of padding have id 0.
  virtual absl::StatusOr<StagedStep> StageWithin(absl::Span<const int32_t> ids,
                                                 absl::Span<const SequenceRows> sequences,
                                                 int32_t page_size,
                                                 const cuda::StepBounds& bounds) = 0;

  // Makes room for steps of so many rows, sequences and pages, so that what Stage and StageHalf
  // return stays where it is. RESOURCE_EXHAUSTED: no memory.
  virtual absl::Status ReserveStage(int64_t rows, int64_t sequences, int64_t pages) = 0;
};

// FAILED_PRECONDITION: no such device, or it is not Hopper. RESOURCE_EXHAUSTED: no memory.
absl::StatusOr<std::unique_ptr<CudaOps>> MakeCudaOps(const CudaOptions& options);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_CUDA_CUDA_OPS_H_
