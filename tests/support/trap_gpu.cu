// The kernel that fails.
#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"
#include "tests/support/trap_gpu.h"

namespace isobit::testing_support {
namespace {

__global__ void Trap() { __trap(); }

}  // namespace

absl::Status TrapGpu(int device) {
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaSetDevice(device));
  Trap<<<1, 1, 0, cudaStreamPerThread>>>();
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaGetLastError());
  return absl::OkStatus();
}

}  // namespace isobit::testing_support
