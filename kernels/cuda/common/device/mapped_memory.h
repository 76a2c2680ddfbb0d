// GPU memory with addresses of its own, so that the memory can be freed while the addresses stay
// reserved.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_DEVICE_MAPPED_MEMORY_H_
#define ISOBIT_KERNELS_CUDA_COMMON_DEVICE_MAPPED_MEMORY_H_

#include <atomic>
#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/device.h"

namespace isobit::cuda {

// Memory of GPU `ordinal`, the current device; peers cannot access it. `taken`: counts the bytes
// currently allocated, in whole GPU pages. RESOURCE_EXHAUSTED: there is too little memory.
// FAILED_PRECONDITION: the driver cannot map memory.
absl::StatusOr<std::unique_ptr<ReleasableMemory>> MapMemory(
    int ordinal, size_t bytes, std::shared_ptr<std::atomic<size_t>> taken);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_DEVICE_MAPPED_MEMORY_H_
