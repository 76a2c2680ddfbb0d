// Enables peer access between the GPUs, and allocates memory on each.
#include "common/parallel/peer_group.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/rank_count.h"
#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"

namespace isobit {
namespace {

using cuda::CudaStatus;

// Restores the calling thread's current device.
class DeviceRestorer {
 public:
  DeviceRestorer() { cudaGetDevice(&device_); }
  DeviceRestorer(const DeviceRestorer&) = delete;
  DeviceRestorer& operator=(const DeviceRestorer&) = delete;
  ~DeviceRestorer() { cudaSetDevice(device_); }

 private:
  int device_ = 0;
};

absl::Status SetDevice(int device) {
  return CudaStatus(cudaSetDevice(device), absl::StrCat("CUDA device ", device));
}

// Lets kernels on `device` reach the memory of `peer`.
absl::Status MapPeer(int device, int peer) {
  int can = 0;
  ISOBIT_RETURN_IF_ERROR(CudaStatus(cudaDeviceCanAccessPeer(&can, device, peer),
                                    absl::StrCat("CUDA devices ", device, " and ", peer)));
  if (can == 0) {
    return absl::FailedPreconditionError(absl::StrCat("CUDA device ", device,
                                                      " cannot map the memory of device ", peer,
                                                      ": no NVLink or PCIe peer access"));
  }
  ISOBIT_RETURN_IF_ERROR(SetDevice(device));
  const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();  // clears it: otherwise a later launch would report it
    return absl::OkStatus();
  }
  return CudaStatus(error, absl::StrCat("CUDA device ", device, " maps device ", peer));
}

}  // namespace

PeerMemory::PeerMemory(PeerMemory&& other) noexcept
    : buffers_(std::exchange(other.buffers_, {})), bytes_(std::exchange(other.bytes_, 0)) {}

PeerMemory& PeerMemory::operator=(PeerMemory&& other) noexcept {
  std::swap(buffers_, other.buffers_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

PeerMemory::~PeerMemory() {
  if (buffers_.empty()) return;
  const DeviceRestorer restorer;
  // A peer's kernel may still be using what this rank would free.
  for (const Buffer& buffer : buffers_) {
    cudaSetDevice(buffer.device);
    cudaDeviceSynchronize();
  }
  for (const Buffer& buffer : buffers_) cudaFree(buffer.bytes);
}

absl::StatusOr<PeerGroup> PeerGroup::Create(absl::Span<const int> devices) {
  const auto ranks = static_cast<int64_t>(devices.size());
  ISOBIT_RETURN_IF_ERROR(CheckRankCount("ranks of a group", ranks));
  int count = 0;
  ISOBIT_RETURN_IF_ERROR(CudaStatus(cudaGetDeviceCount(&count), "counting CUDA devices"));
  for (const int device : devices) {
    if (device < 0 || device >= count) {
      return absl::FailedPreconditionError(absl::StrCat(
          "CUDA devices ", absl::StrJoin(devices, ","), " asked for: this machine has ", count));
    }
  }
  const DeviceRestorer restorer;
  for (const int device : devices) {
    for (const int peer : devices) {
      if (device != peer) ISOBIT_RETURN_IF_ERROR(MapPeer(device, peer));
    }
  }
  return PeerGroup(devices);
}

int PeerGroup::most_ranks_on_a_device() const {
  std::ptrdiff_t most = 0;
  for (const int device : devices_) most = std::max(most, std::ranges::count(devices_, device));
  return static_cast<int>(most);
}

absl::StatusOr<PeerMemory> PeerGroup::Allocate(size_t bytes, unsigned char fill) const {
  const DeviceRestorer restorer;
  PeerMemory memory;
  memory.bytes_ = bytes;
  for (const int device : devices_) {
    ISOBIT_RETURN_IF_ERROR(SetDevice(device));
    void* buffer = nullptr;
    ISOBIT_RETURN_IF_ERROR(
        CudaStatus(cudaMalloc(&buffer, std::max<size_t>(bytes, 1)),
                   absl::StrCat(bytes, " bytes shared by the ranks, on CUDA device ", device)));
    memory.buffers_.push_back({device, static_cast<std::byte*>(buffer)});
    ISOBIT_RETURN_IF_ERROR(CudaStatus(cudaMemset(buffer, fill, bytes), "cudaMemset"));
    ISOBIT_RETURN_IF_ERROR(CudaStatus(cudaDeviceSynchronize(), "cudaDeviceSynchronize"));
  }
  return memory;
}

}  // namespace isobit
