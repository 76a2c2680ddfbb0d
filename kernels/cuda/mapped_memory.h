// GPU memory behind addresses of its own, so that the memory can be given back while the addresses
// stay.
#ifndef ISOBIT_KERNELS_CUDA_MAPPED_MEMORY_H_
#define ISOBIT_KERNELS_CUDA_MAPPED_MEMORY_H_

#include <atomic>
#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/device.h"

namespace isobit::cuda {

// Memory of the GPU `ordinal`, the current device; peers cannot reach it. `taken`: counts the bytes
// that it has taken, which are whole pages of the GPU. RESOURCE_EXHAUSTED: not enough memory.
// FAILED_PRECONDITION: the driver cannot map memory.
absl::StatusOr<std::unique_ptr<ReleasableMemory>> MapMemory(
    int ordinal, size_t bytes, std::shared_ptr<std::atomic<size_t>> taken);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_MAPPED_MEMORY_H_
