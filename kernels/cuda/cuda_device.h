// A rank's GPU: its memory, and the stream on which copies and ops run. The stream is the device's
// own or the caller's.
#ifndef ISOBIT_KERNELS_CUDA_CUDA_DEVICE_H_
#define ISOBIT_KERNELS_CUDA_CUDA_DEVICE_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/parallel/weight_senders.h"
#include "kernels/cuda/common/device/card.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/device.h"

namespace isobit {

// A stream that lives as long as the object. Movable, not copyable.
class CudaStream {
 public:
  // The GPU must exist. The stream and the legacy default stream do not wait for each other.
  static absl::StatusOr<CudaStream> Create(int ordinal);
  CudaStream(CudaStream&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  CudaStream& operator=(CudaStream&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~CudaStream();

  cudaStream_t handle() const { return handle_; }

 private:
  explicit CudaStream(cudaStream_t handle) : handle_(handle) {}
  cudaStream_t handle_;
};

class CudaDevice final : public Device {
 public:
  // stream: a stream of that GPU on which the ops run, in the caller's order; it outlives the
  // object. nullptr is the default stream. If none is given, the device creates its own stream.
  // FAILED_PRECONDITION: the GPU does not exist or is not Hopper.
  static absl::StatusOr<std::unique_ptr<CudaDevice>> Create(
      int ordinal, std::optional<cudaStream_t> stream = std::nullopt);

  int ordinal() const { return ordinal_; }
  const std::string& name() const { return name_; }  // the GPU's
  const cuda::Card& card() const { return card_; }
  const cuda::Stream& stream() const { return stream_; }
  // Makes this GPU the calling thread's current device.
  absl::Status Enter() const;

  // The stream of AllocateBeside, Upload and packers.
  cudaStream_t side_stream() const { return side_->handle(); }
  // For packers: the senders of weights to this rank, on the side stream; null: there are none.
  // Call it before the first packer is made.
  void SetWeightSenders(std::unique_ptr<WeightSenders> senders) { senders_ = std::move(senders); }

  bool is_host() const override { return false; }
  absl::StatusOr<Memory> Allocate(size_t bytes) override;
  // FAILED_PRECONDITION: the driver cannot map memory.
  absl::StatusOr<std::unique_ptr<ReleasableMemory>> AllocateReleasable(size_t bytes) override;
  absl::StatusOr<std::shared_ptr<const std::byte>> Share(std::shared_ptr<const std::byte> host,
                                                         size_t bytes) override;
  absl::StatusOr<Memory> AllocateBeside(size_t bytes) override;
  absl::Status Upload(void* to, const void* from, size_t bytes) override;
  absl::StatusOr<std::unique_ptr<DevicePacker>> MakePacker() override;
  absl::Status Copy(void* to, const void* from, size_t bytes) override;
  absl::Status Synchronize() override;

  // The bytes that these two have allocated and that are not freed or released. Any thread.
  size_t allocated_bytes() const { return *allocated_; }

 private:
  CudaDevice(int ordinal, std::string name, const cuda::Card& card)
      : ordinal_(ordinal), name_(std::move(name)), card_(card) {}

  const int ordinal_;
  const std::string name_;
  const cuda::Card card_;
  std::unique_ptr<CudaStream> own_stream_;  // null: the caller's is used
  cuda::Stream stream_ = {.card = &card_};
  std::shared_ptr<const CudaStream> side_;  // memory keeps it alive
  std::unique_ptr<WeightSenders> senders_;
  const std::shared_ptr<std::atomic<size_t>> allocated_ =
      std::make_shared<std::atomic<size_t>>(0);  // memory may outlive the device
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_CUDA_CUDA_DEVICE_H_
