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

// One rank's. Used from one thread at a time, but for AllocateBeside and Upload.
class Device {
 public:
  virtual ~Device() = default;

  // Whether its memory is the host's, so that the host may write what Allocate has given.
  virtual bool is_host() const = 0;

  // Bytes of no particular value, aligned to 256. RESOURCE_EXHAUSTED: not that much memory.
  virtual absl::StatusOr<Memory> Allocate(size_t bytes) = 0;
  // Host bytes for the ops to read: a copy of them, or the bytes themselves.
  virtual absl::StatusOr<std::shared_ptr<const std::byte>> Share(
      std::shared_ptr<const std::byte> host, size_t bytes) = 0;

  // For any thread, while another one uses the ops, which neither wait for these calls nor are
  // waited for: memory like Allocate's, if what is then left is enough for the ops (else
  // RESOURCE_EXHAUSTED); and a copy of host bytes into the device's memory, done on return.
  virtual absl::StatusOr<Memory> AllocateBeside(size_t bytes) = 0;
  virtual absl::Status Upload(void* to, const void* from, size_t bytes) = 0;

  // Copies in order with the ops, within the device's memory or between it and host memory, where
  // what is read must stay, and what is written must wait, until Synchronize.
  virtual absl::Status Copy(void* to, const void* from, size_t bytes) = 0;
  // Waits until every op so far has ended, and returns the error of one that failed.
  virtual absl::Status Synchronize() = 0;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_DEVICE_H_
