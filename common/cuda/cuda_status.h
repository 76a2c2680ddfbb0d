// CUDA errors as absl::Status: one set of codes for all code that calls CUDA.
#ifndef ISOBIT_COMMON_CUDA_CUDA_STATUS_H_
#define ISOBIT_COMMON_CUDA_CUDA_STATUS_H_

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace isobit::cuda {

// OK, or RESOURCE_EXHAUSTED (no memory), FAILED_PRECONDITION (no usable device or driver, or no
// access to a peer), INTERNAL (everything else). The message names what was tried and CUDA's
// reason.
inline absl::Status CudaStatus(cudaError_t error, absl::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string message =
      absl::StrCat(what, ": ", cudaGetErrorName(error), ", ", cudaGetErrorString(error));
  switch (error) {
    case cudaErrorMemoryAllocation:
      return absl::ResourceExhaustedError(message);
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorDevicesUnavailable:
    case cudaErrorInsufficientDriver:
    case cudaErrorStubLibrary:
    case cudaErrorSystemNotReady:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorPeerAccessUnsupported:
    case cudaErrorTooManyPeers:
      return absl::FailedPreconditionError(message);
    default:
      return absl::InternalError(message);
  }
}

}  // namespace isobit::cuda

// Returns the status of a CUDA runtime call from the enclosing function unless it succeeded.
#define ISOBIT_RETURN_IF_CUDA_ERROR(call)                                         \
  do {                                                                            \
    if (const cudaError_t isobit_error_ = (call); isobit_error_ != cudaSuccess) { \
      return ::isobit::cuda::CudaStatus(isobit_error_, #call);                    \
    }                                                                             \
  } while (false)

#endif  // ISOBIT_COMMON_CUDA_CUDA_STATUS_H_
