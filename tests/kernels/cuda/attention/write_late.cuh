// A predecessor that writes what a step changes late, so that a test sees what attention reads too
// early.
#ifndef ISOBIT_TESTS_KERNELS_CUDA_ATTENTION_WRITE_LATE_CUH_
#define ISOBIT_TESTS_KERNELS_CUDA_ATTENTION_WRITE_LATE_CUH_

#include <utility>

#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "tests/kernels/cuda/attention/batch.h"

namespace isobit::cuda {

// Writes what this step changes, after as long a time as a step's earlier kernels may take.
inline __global__ void WriteLate(Bf16* to, const Bf16* from, int64_t n) {
  ReleaseSuccessor();
  WaitForPredecessor();
  for (const int64_t begin = clock64(); clock64() - begin < 100000;) {
  }
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += threads) {
    if (to[i] != from[i]) to[i] = from[i];
  }
}

// Puts kernels on the stream that write k, v and q into the batch's memory, late.
inline absl::Status LaunchWriteLate(DeviceBatch& device, DeviceBuffer<Bf16>& k,
                                    DeviceBuffer<Bf16>& v, DeviceBuffer<Bf16>& q,
                                    const Stream& stream) {
  const Grid grid = {.blocks = dim3(8), .threads = dim3(512)};
  for (const auto& [to, from] :
       {std::pair(&device.k(), &k), std::pair(&device.v(), &v), std::pair(&device.q(), &q)}) {
    const absl::Status status =
        Launch(WriteLate, grid, stream, to->data(), from->data(), from->size());
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace isobit::cuda

#endif  // ISOBIT_TESTS_KERNELS_CUDA_ATTENTION_WRITE_LATE_CUH_
