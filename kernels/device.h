// Where a rank computes: its memory, and the order in which copies and ops run there (on a GPU, a
// stream). Not here: what is computed (ops.h).
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

// Bytes in a device's memory at one address for life, which can be given back to the system
// meanwhile: what holds the address, such as a captured graph, stays valid. Release and Restore are
// called by one thread at a time; the rest, on any thread.
// INVARIANT: released bytes are the system's (DeviceMemoryTest.*, CudaMemoryTest.*).
class ReleasableMemory {
 public:
  virtual ~ReleasableMemory() = default;
  ReleasableMemory(const ReleasableMemory&) = delete;
  ReleasableMemory& operator=(const ReleasableMemory&) = delete;

  std::byte* get() const { return address_; }
  bool is_released() const { return released_; }
  // That it has taken: 0 while released.
  size_t bytes() const { return released_ ? 0 : bytes_; }

  // Gives the bytes back; what they held is lost. No op uses them, or will before Restore.
  virtual absl::Status Release() = 0;
  // Takes bytes again, uninitialised. RESOURCE_EXHAUSTED: not enough memory; they stay released.
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
  // Likewise, of bytes that can be given back.
  virtual absl::StatusOr<std::unique_ptr<ReleasableMemory>> AllocateReleasable(size_t bytes) = 0;
  // Host bytes for the ops to read: a copy of them, or the bytes themselves.
  virtual absl::StatusOr<std::shared_ptr<const std::byte>> Share(
      std::shared_ptr<const std::byte> host, size_t bytes) = 0;

  // These three may be called on any thread while another thread runs ops; none waits for the
  // ops. AllocateBeside is like Allocate, but fails with RESOURCE_EXHAUSTED if too little memory
  // would be left for the ops. Upload copies host bytes into the device's memory; the copy is done
  // on return.
  virtual absl::StatusOr<Memory> AllocateBeside(size_t bytes) = 0;
  virtual absl::Status Upload(void* to, const void* from, size_t bytes) = 0;
  // For weights that are in the device's memory already. Its work and Upload's follow each other.
  // The device outlives it. UNIMPLEMENTED: the device is the host.
  virtual absl::StatusOr<std::unique_ptr<DevicePacker>> MakePacker() = 0;

  // Copies in order with the ops, within the device's memory or between it and host memory. Until
  // Synchronize the host must not change the bytes that are read, nor use those that are written.
  virtual absl::Status Copy(void* to, const void* from, size_t bytes) = 0;
  // Waits until every op so far has ended, and returns the error of one that failed.
  virtual absl::Status Synchronize() = 0;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_DEVICE_H_
