// Allocations, copies and waits on a stream.
#include "kernels/cuda/cuda_device.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"
#include "kernels/cuda/common/device/mapped_memory.h"
#include "kernels/cuda/sm90/device/card.h"
#include "kernels/cuda/sm90/device/device_info.h"
#include "kernels/cuda/sm90/weights/cuda_device_packer.h"

namespace isobit {
namespace {

using cuda::CudaStatus;

// Memory that AllocateBeside leaves free for the ops' scratch, which may still grow.
constexpr size_t kSpareBytes = size_t{1} << 30;

}  // namespace

absl::StatusOr<CudaStream> CudaStream::Create(int ordinal) {
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaSetDevice(ordinal));
  cudaStream_t handle = nullptr;
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking));
  return CudaStream(handle);
}

CudaStream::~CudaStream() {
  if (handle_ != nullptr) cudaStreamDestroy(handle_);
}

absl::StatusOr<std::unique_ptr<CudaDevice>> CudaDevice::Create(int ordinal,
                                                               std::optional<cudaStream_t> stream) {
  ISOBIT_ASSIGN_OR_RETURN(const cuda::DeviceInfo info, cuda::GetDeviceInfo(ordinal));
  ISOBIT_ASSIGN_OR_RETURN(const cuda::Card card, cuda::GetCard(ordinal));
  std::unique_ptr<CudaDevice> device(new CudaDevice(ordinal, info.name, card));
  ISOBIT_RETURN_IF_ERROR(device->Enter());
  if (stream) {
    device->stream_.handle = *stream;
  } else {
    ISOBIT_ASSIGN_OR_RETURN(CudaStream own, CudaStream::Create(ordinal));
    device->own_stream_ = std::make_unique<CudaStream>(std::move(own));
    device->stream_.handle = device->own_stream_->handle();
  }
  ISOBIT_ASSIGN_OR_RETURN(CudaStream side, CudaStream::Create(ordinal));
  device->side_ = std::make_shared<const CudaStream>(std::move(side));
  return device;
}

absl::Status CudaDevice::Enter() const {
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaSetDevice(ordinal_));
  return absl::OkStatus();
}

// Freeing waits for the device, so no op can still be using the memory.
absl::StatusOr<Memory> CudaDevice::Allocate(size_t bytes) {
  ISOBIT_RETURN_IF_ERROR(Enter());
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, std::max<size_t>(bytes, 1));
  if (error != cudaSuccess) {
    cudaGetLastError();  // clears the error, which a later launch would otherwise report
    return CudaStatus(error, absl::StrCat("cudaMalloc of ", bytes, " bytes"));
  }
  *allocated_ += bytes;
  return Memory(static_cast<std::byte*>(memory), [allocated = allocated_, bytes](std::byte* p) {
    cudaFree(p);
    *allocated -= bytes;
  });
}

absl::StatusOr<std::unique_ptr<ReleasableMemory>> CudaDevice::AllocateReleasable(size_t bytes) {
  ISOBIT_RETURN_IF_ERROR(Enter());
  return cuda::MapMemory(ordinal_, bytes, allocated_);
}

absl::StatusOr<std::shared_ptr<const std::byte>> CudaDevice::Share(
    std::shared_ptr<const std::byte> host, size_t bytes) {
  ISOBIT_ASSIGN_OR_RETURN(Memory memory, Allocate(bytes));
  ISOBIT_RETURN_IF_ERROR(Copy(memory.get(), host.get(), bytes));
  ISOBIT_RETURN_IF_ERROR(Synchronize());
  std::byte* const copy = memory.get();
  return std::shared_ptr<const std::byte>(std::make_shared<Memory>(std::move(memory)), copy);
}

// Allocates from the GPU's pool, in the order of the side stream. cudaMalloc and cudaFree would
// wait for all kernels, also for one that waits for a peer that in turn waits for the caller.
absl::StatusOr<Memory> CudaDevice::AllocateBeside(size_t bytes) {
  ISOBIT_RETURN_IF_ERROR(Enter());
  size_t free = 0;
  size_t total = 0;
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaMemGetInfo(&free, &total));
  if (free < kSpareBytes || free - kSpareBytes < bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("no room for ", bytes, " bytes: ", free,
                                                     " are free, and ", kSpareBytes,
                                                     " of them must stay free"));
  }
  void* memory = nullptr;
  const cudaError_t error = cudaMallocAsync(&memory, std::max<size_t>(bytes, 1), side_->handle());
  if (error != cudaSuccess) {
    return CudaStatus(error, absl::StrCat("cudaMallocAsync of ", bytes, " bytes"));
  }
  return Memory(static_cast<std::byte*>(memory), [side = side_](std::byte* p) {
    cudaFreeAsync(p, side->handle());
    cudaStreamSynchronize(side->handle());  // the pool then returns the memory to the GPU
  });
}

absl::Status CudaDevice::Upload(void* to, const void* from, size_t bytes) {
  ISOBIT_RETURN_IF_ERROR(Enter());
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, side_->handle()));
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(side_->handle()));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<DevicePacker>> CudaDevice::MakePacker() {
  ISOBIT_RETURN_IF_ERROR(Enter());
  return std::make_unique<cuda::CudaDevicePacker>(*this, ordinal_, side_->handle(), senders_.get());
}

absl::Status CudaDevice::Copy(void* to, const void* from, size_t bytes) {
  ISOBIT_RETURN_IF_ERROR(Enter());
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_.handle));
  return absl::OkStatus();
}

absl::Status CudaDevice::Synchronize() {
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream_.handle));
  return absl::OkStatus();
}

}  // namespace isobit
