// Foreign memory that is mapped, and the launches of the packing kernels.
#include "kernels/cuda/sm90/weights/cuda_device_packer.h"

#include <cuda.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"
#include "kernels/cuda/common/device/driver_function.h"
#include "kernels/cuda/sm90/weights/weight_kernels.h"

namespace isobit::cuda {

CudaDevicePacker::~CudaDevicePacker() {
  // Nobody could handle an error.
  static_cast<void>(Finish());
  for (void* const memory : foreign_) cudaIpcCloseMemHandle(memory);
}

absl::Status CudaDevicePacker::Enter() const {
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaSetDevice(ordinal_));
  return absl::OkStatus();
}

absl::StatusOr<ForeignMemory> CudaDevicePacker::MapForeign(const std::string& handle) {
  cudaIpcMemHandle_t exported;
  if (handle.size() != sizeof(exported.reserved)) {
    return absl::InvalidArgumentError(absl::StrCat("a CUDA IPC handle of ", handle.size(),
                                                   " bytes, expected ", sizeof(exported.reserved)));
  }
  std::memcpy(exported.reserved, handle.data(), handle.size());
  ISOBIT_RETURN_IF_ERROR(Enter());
  void* memory = nullptr;
  const cudaError_t error = cudaIpcOpenMemHandle(&memory, exported, cudaIpcMemLazyEnablePeerAccess);
  if (error != cudaSuccess) {
    cudaGetLastError();  // clears the error, which a later launch would otherwise report
    return absl::InvalidArgumentError(absl::StrCat(
        "cudaIpcOpenMemHandle: ", cudaGetErrorString(error),
        "; expected memory of another process on this host, on a GPU that this one can reach"));
  }
  foreign_.push_back(memory);
  static const auto range_of =
      FindDriverFunction<decltype(&cuMemGetAddressRange)>("cuMemGetAddressRange");
  ISOBIT_RETURN_IF_ERROR(range_of.status());
  size_t bytes = 0;
  if ((*range_of)(nullptr, &bytes, reinterpret_cast<CUdeviceptr>(memory)) != CUDA_SUCCESS) {
    return absl::InternalError("cuMemGetAddressRange does not know what it has opened");
  }
  return ForeignMemory{static_cast<const std::byte*>(memory), bytes};
}

absl::Status CudaDevicePacker::Round(const StoredMatrix& from, Bf16* to, int64_t to_stride) {
  ISOBIT_RETURN_IF_ERROR(Enter());
  return RoundWeights(from, to, to_stride, stream_);
}

absl::Status CudaDevicePacker::Pack(const LinearShape& shape, const WeightPacker& layout,
                                    const Bf16* w, std::byte* packed) {
  if (layout.keeps_rows()) return Copy(packed, w, layout.PackedBytes(shape));
  ISOBIT_RETURN_IF_ERROR(Enter());
  return PackLinearOnDevice(shape, w, packed, stream_);
}

absl::Status CudaDevicePacker::Widen(const Bf16* from, int64_t count, float* to) {
  ISOBIT_RETURN_IF_ERROR(Enter());
  return WidenBiases(from, count, to, stream_);
}

absl::Status CudaDevicePacker::FillWithZeros(std::byte* to, size_t bytes) {
  ISOBIT_RETURN_IF_ERROR(Enter());
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(to, 0, bytes, stream_.handle));
  return absl::OkStatus();
}

absl::Status CudaDevicePacker::AddSums(const Bf16* values, int64_t rows, int64_t columns,
                                       const PartOfTensor& part, uint64_t* sums) {
  ISOBIT_RETURN_IF_ERROR(Enter());
  return AddWeightSums({.values = values, .rows = rows, .columns = columns, .stride = columns},
                       part, sums, stream_);
}

absl::Status CudaDevicePacker::Copy(void* to, const void* from, size_t bytes) {
  ISOBIT_RETURN_IF_ERROR(Enter());
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_.handle));
  return absl::OkStatus();
}

absl::Status CudaDevicePacker::Finish() {
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream_.handle));
  return absl::OkStatus();
}

}  // namespace isobit::cuda
