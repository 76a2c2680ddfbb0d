// The device of backends that compute in host memory: ops and copies have ended when their calls
// return.
#ifndef ISOBIT_KERNELS_HOST_DEVICE_H_
#define ISOBIT_KERNELS_HOST_DEVICE_H_

#include "kernels/device.h"
#include "kernels/device_packer.h"

namespace isobit {

class HostDevice : public Device {
 public:
  bool is_host() const override { return true; }
  absl::StatusOr<Memory> Allocate(size_t bytes) override;
  absl::StatusOr<std::unique_ptr<ReleasableMemory>> AllocateReleasable(size_t bytes) override;
  absl::StatusOr<std::shared_ptr<const std::byte>> Share(std::shared_ptr<const std::byte> host,
                                                         size_t /*bytes*/) override {
    return host;
  }
  absl::StatusOr<Memory> AllocateBeside(size_t bytes) override { return Allocate(bytes); }
  absl::Status Upload(void* to, const void* from, size_t bytes) override {
    return Copy(to, from, bytes);
  }
  absl::StatusOr<std::unique_ptr<DevicePacker>> MakePacker() override;
  absl::Status Copy(void* to, const void* from, size_t bytes) override;
  absl::Status Synchronize() override { return absl::OkStatus(); }
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_HOST_DEVICE_H_
