// Where a rank computes: its memory, and the order in which copies and ops run there (on a GPU, a
// stream). Not here: what is computed (backend.h).
#ifndef ISOBIT_KERNELS_DEVICE_H_
#define ISOBIT_KERNELS_DEVICE_H_

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace isobit {

class DevicePacker;

// Bytes in a device's memory, freed with the object.
using Memory = std::unique_ptr<std::byte[], std::function<void(std::byte*)>>;

// Bytes in a device's memory that keep their address for life but can be freed and allocated again:
// whatever holds the address, such as a captured graph, stays valid. One thread at a time calls
// Release and Restore; any thread may call the rest. INVARIANT: released bytes are the system's
// (DeviceMemoryTest.*, CudaMemoryTest.*).
class ReleasableMemory {
 public:
  virtual ~ReleasableMemory() = default;
  ReleasableMemory(const ReleasableMemory&) = delete;
  ReleasableMemory& operator=(const ReleasableMemory&) = delete;

  std::byte* get() const { return address_; }
  bool is_released() const { return released_; }
  // Currently allocated: 0 while released.
  size_t bytes() const { return released_ ? 0 : bytes_; }

  // Frees the bytes; their content is lost. No op may use them from now until Restore.
  virtual absl::Status Release() = 0;
  // Allocates the bytes again, uninitialised. RESOURCE_EXHAUSTED: no memory; they stay released.
  virtual absl::Status Restore() = 0;

 protected:
  ReleasableMemory() = default;

  std::byte* address_ = nullptr;
  size_t bytes_ = 0;
  std::atomic<bool> released_ = true;
};

// One rank's device. Used from one thread at a time, except AllocateBeside, Upload and
// MakePacker.
class Device {
 public:
  virtual ~Device() = default;

  // Whether its memory is host memory, so that the host may write to what Allocate returns.
  virtual bool is_host() const = 0;

  // Uninitialised bytes, aligned to 256. RESOURCE_EXHAUSTED: not enough memory.
  virtual absl::StatusOr<Memory> Allocate(size_t bytes) = 0;
  // The same, for bytes that can be released.
  virtual absl::StatusOr<std::unique_ptr<ReleasableMemory>> AllocateReleasable(size_t bytes) = 0;
  // Makes host bytes readable for the ops: by a copy, or as they are.
  virtual absl::StatusOr<std::shared_ptr<const std::byte>> Share(
      std::shared_ptr<const std::byte> host, size_t bytes) = 0;

  // These three may be called on any thread while another thread runs ops, and do not wait for the
  // ops. AllocateBeside is like Allocate, but fails with RESOURCE_EXHAUSTED if too little memory
  // would be left for the ops. Upload copies host bytes into the device's memory; the copy is done
  // on return.
  virtual absl::StatusOr<Memory> AllocateBeside(size_t bytes) = 0;
  virtual absl::Status Upload(void* to, const void* from, size_t bytes) = 0;
  // Makes a packer for weights that are already in the device's memory. Its work and Upload's run
  // one after the other. The device outlives it. UNIMPLEMENTED: the device is the host.
  virtual absl::StatusOr<std::unique_ptr<DevicePacker>> MakePacker() = 0;

  // Copies in order with the ops, within the device's memory or between it and host memory. Until
  // Synchronize the host must not change the source, nor use the destination.
  virtual absl::Status Copy(void* to, const void* from, size_t bytes) = 0;
  // Waits until all ops so far have ended; returns the error if one failed.
  virtual absl::Status Synchronize() = 0;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_DEVICE_H_
