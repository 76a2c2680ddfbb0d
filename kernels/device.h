// Where a rank computes: its memory, and the order in which copies and ops run there (on a GPU, a
// stream). Not here: what is computed (ops.h).
#ifndef ISOBIT_KERNELS_DEVICE_H_
#define ISOBIT_KERNELS_DEVICE_H_

#include <cstddef>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace isobit {

// Bytes in a device's memory, freed with the object.
using Memory = std::unique_ptr<std::byte[], std::function<void(std::byte*)>>;

// One rank's device. Used from one thread at a time, except AllocateBeside and Upload.
class Device {
 public:
  virtual ~Device() = default;

  // Whether its memory is host memory, so that the host may write to what Allocate returns.
  virtual bool is_host() const = 0;

  // Uninitialised bytes, aligned to 256. RESOURCE_EXHAUSTED: not enough memory.
  virtual absl::StatusOr<Memory> Allocate(size_t bytes) = 0;
  // Host bytes for the ops to read: a copy of them, or the bytes themselves.
  virtual absl::StatusOr<std::shared_ptr<const std::byte>> Share(
      std::shared_ptr<const std::byte> host, size_t bytes) = 0;

  // These two may be called on any thread while another thread runs ops; neither waits for the
  // other. AllocateBeside is like Allocate, but fails with RESOURCE_EXHAUSTED if too little memory
  // would be left for the ops. Upload copies host bytes into the device's memory; the copy is done
  // on return.
  virtual absl::StatusOr<Memory> AllocateBeside(size_t bytes) = 0;
  virtual absl::Status Upload(void* to, const void* from, size_t bytes) = 0;

  // Copies in order with the ops, within the device's memory or between it and host memory. Until
  // Synchronize the host must not change the bytes that are read, nor use those that are written.
  virtual absl::Status Copy(void* to, const void* from, size_t bytes) = 0;
  // Waits until every op so far has ended, and returns the error of one that failed.
  virtual absl::Status Synchronize() = 0;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_DEVICE_H_
