// Random data made on the device: normal values by seed and index.
#include <cuda_bf16.h>

#include "bench/kernels/harness.h"
#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"

namespace isobit::bench {
namespace {

// A bijection of 32 bits without visible structure.
__device__ uint32_t Mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// A normal value (Box-Muller) that depends on the seed and the index alone.
__device__ float Normal(uint32_t seed, size_t i) {
  const uint32_t a = Mix(static_cast<uint32_t>(i) ^ Mix(seed + static_cast<uint32_t>(i >> 32)));
  const uint32_t b = Mix(a + 0x9e3779b9u);
  const float radius = sqrtf(-2.0f * logf(static_cast<float>((a >> 8) + 1) * 0x1p-24f));
  return radius * cospif(static_cast<float>(b >> 8) * 0x1p-23f);
}

__device__ void Store(float x, __nv_bfloat16* to) { *to = __float2bfloat16_rn(x); }
__device__ void Store(float x, float* to) { *to = x; }

template <typename T>
__global__ void FillNormal(T* data, size_t count, uint32_t seed, float scale) {
  const size_t stride = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    Store(scale * Normal(seed, i), data + i);
  }
}

template <typename T>
absl::StatusOr<DeviceMemory> Random(size_t bytes, uint32_t seed, float scale) {
  ISOBIT_ASSIGN_OR_RETURN(DeviceMemory memory, AllocateDevice(bytes));
  FillNormal<<<2048, 256>>>(reinterpret_cast<T*>(memory.get()), bytes / sizeof(T), seed, scale);
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaGetLastError());
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaDeviceSynchronize());
  return memory;
}

}  // namespace

absl::StatusOr<DeviceMemory> RandomBf16(size_t bytes, uint32_t seed, float scale) {
  return Random<__nv_bfloat16>(bytes, seed, scale);
}

absl::StatusOr<DeviceMemory> RandomFp32(size_t bytes, uint32_t seed, float scale) {
  return Random<float>(bytes, seed, scale);
}

}  // namespace isobit::bench
