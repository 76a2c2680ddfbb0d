// Packs weights that are already in a GPU's memory, by the kernels of weight_kernels.h on the
// device's side stream.
#ifndef ISOBIT_KERNELS_CUDA_SM90_WEIGHTS_CUDA_DEVICE_PACKER_H_
#define ISOBIT_KERNELS_CUDA_SM90_WEIGHTS_CUDA_DEVICE_PACKER_H_

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "kernels/cuda/common/device/launch.h"
#include "kernels/device.h"
#include "kernels/device_packer.h"

namespace isobit::cuda {

class CudaDevicePacker final : public DevicePacker {
 public:
  // `device` is GPU `ordinal`; it, its stream `side` and the senders to it, which may be null,
  // outlive the object.
  CudaDevicePacker(Device& device, int ordinal, cudaStream_t side, WeightSenders* senders)
      : device_(device),
        ordinal_(ordinal),
        stream_{.handle = side, .dependent = false},
        senders_(senders) {}
  ~CudaDevicePacker() override;

  absl::StatusOr<Memory> Allocate(size_t bytes) override { return device_.AllocateBeside(bytes); }
  absl::StatusOr<ForeignMemory> MapForeign(const std::string& handle) override;
  WeightSenders* senders() override { return senders_; }
  absl::Status Round(const StoredMatrix& from, Bf16* to, int64_t to_stride) override;
  absl::Status Pack(const LinearShape& shape, const WeightPacker& layout, const Bf16* w,
                    std::byte* packed) override;
  absl::Status Widen(const Bf16* from, int64_t count, float* to) override;
  absl::Status FillWithZeros(std::byte* to, size_t bytes) override;
  absl::Status AddSums(const Bf16* values, int64_t rows, int64_t columns, const PartOfTensor& part,
                       uint64_t* sums) override;
  absl::Status Copy(void* to, const void* from, size_t bytes) override;
  absl::Status Finish() override;

 private:
  absl::Status Enter() const;  // makes the GPU the calling thread's current device

  Device& device_;
  const int ordinal_;
  const Stream stream_;
  WeightSenders* const senders_;
  std::vector<void*> foreign_;
};

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_WEIGHTS_CUDA_DEVICE_PACKER_H_
