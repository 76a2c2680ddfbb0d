// How every kernel of kernels/cuda is launched: on a stream, with its status checked, and as a
// dependent of the kernel before it.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_DEVICE_LAUNCH_H_
#define ISOBIT_KERNELS_CUDA_COMMON_DEVICE_LAUNCH_H_

#include <cuda_runtime.h>

#include <cstddef>
#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/cuda/cuda_status.h"

namespace isobit::cuda {

struct Card;  // card.h

// Allocates scratch for one op: so many bytes of the device's memory, at a multiple of 256, valid
// until the work that the op has enqueued is done.
using Scratch = std::function<absl::StatusOr<std::byte*>(size_t bytes)>;

// Where an op runs. `dependent`: the kernel may start while the previous kernel in the stream still
// runs (programmatic dependent launch). So every kernel calls WaitForPredecessor
// (dependent_launch.cuh) before its first access to anything but weights; the one exception is
// WaitsFirst in sm90/collective/all_reduce.cuh. Because every kernel calls it, completion is
// transitive along the stream.
struct Stream {
  cudaStream_t handle = nullptr;
  bool dependent = true;
  const Scratch* scratch = nullptr;  // for ops that need it, which call ScratchOf
  const Card* card = nullptr;        // of the GPU, for ops whose schedule depends on it: CardOf

  Stream WithDependent(bool is_dependent) const { return {handle, is_dependent, scratch, card}; }
};

// Null for 0 bytes. FAILED_PRECONDITION: the stream has no scratch. Other errors: its own.
inline absl::StatusOr<std::byte*> ScratchOf(const Stream& stream, size_t bytes) {
  if (bytes == 0) return nullptr;
  if (stream.scratch == nullptr) return absl::FailedPreconditionError("the stream has no scratch");
  return (*stream.scratch)(bytes);
}

// The card, never null. FAILED_PRECONDITION: the stream has none.
inline absl::StatusOr<const Card*> CardOf(const Stream& stream) {
  if (stream.card == nullptr) return absl::FailedPreconditionError("the stream has no card");
  return stream.card;
}

struct Grid {
  dim3 blocks;
  dim3 threads;
  size_t shared_bytes = 0;
  int cluster = 1;  // blocks of a cluster, along x
};

// With at most so much dynamic shared memory, a kernel needs no higher limit: a block may have 48
// KB, and no kernel has more than 16 KB of static variables. INVARIANT: resource_usage_test.py.
inline constexpr size_t kUnraisedSharedBytes = 32 * 1024;

// Launches kernel<<<grid>>>(args...), and raises the limit of shared memory as needed. An empty
// grid launches nothing. INTERNAL: CUDA refused.
template <typename... Params, typename... Args>
absl::Status Launch(void (*kernel)(Params...), const Grid& grid, const Stream& stream,
                    Args&&... args) {
  if (grid.blocks.x == 0 || grid.blocks.y == 0 || grid.blocks.z == 0) return absl::OkStatus();
  if (grid.shared_bytes > kUnraisedSharedBytes) {
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(grid.shared_bytes)));
  }
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (stream.dependent) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid.blocks;
  config.blockDim = grid.threads;
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream.handle;
  config.attrs = attributes;
  config.numAttrs = count;
  ISOBIT_RETURN_IF_CUDA_ERROR(
      cudaLaunchKernelEx(&config, kernel, static_cast<Params>(std::forward<Args>(args))...));
  return absl::OkStatus();
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_DEVICE_LAUNCH_H_
