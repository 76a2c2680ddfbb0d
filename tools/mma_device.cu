// The steps on a GPU, one tile a thread block. See mma_device.h.
#include <cuda_runtime_api.h>

#include <memory>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"
#include "kernels/cuda/common/device/mma_sync.cuh"
#include "kernels/cuda/sm90/device/barrier.cuh"
#include "kernels/cuda/sm90/device/wgmma.cuh"
#include "tools/mma_device.h"

namespace isobit {
namespace {

using contract::Bf16;

constexpr int kThreads = 128;                // four warps, or one warpgroup, with 16 rows of a each
constexpr int kPairs = contract::kMmaK / 2;  // words of two operands in a row

// Device code compiled for the architecture that has wgmma.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define ISOBIT_HAS_WGMMA 1
#else
#define ISOBIT_HAS_WGMMA 0
#endif

__global__ void MmaSyncTiles(const uint32_t* a, const uint32_t* b, const float* c, float* d) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
  const int pair = lane % 4;
  a += (int64_t{blockIdx.x} * kTileRows + row) * kPairs + pair;
  const uint32_t fragment_a[4] = {a[0], a[8 * kPairs], a[4], a[8 * kPairs + 4]};
  for (int column = 0; column < kTileRows; column += 8) {
    const uint32_t* const from =
        b + (int64_t{blockIdx.x} * kTileRows + column + lane / 4) * kPairs + pair;
    const uint32_t fragment_b[2] = {from[0], from[4]};
    const int64_t first = int64_t{blockIdx.x} * kStepsPerTile + row * kTileRows + column + 2 * pair;
    const int64_t second = first + 8 * kTileRows;
    float sums[4] = {c[first], c[first + 1], c[second], c[second + 1]};
    cuda::MmaSync(sums, fragment_a, fragment_b);
    d[first] = sums[0];
    d[first + 1] = sums[1];
    d[second] = sums[2];
    d[second + 1] = sums[3];
  }
}

#if ISOBIT_HAS_WGMMA
// Copies 64 rows of 16 operands to where a K-major operand of 64 columns has its first 16, under
// the 128-byte swizzle: 16-byte unit u of row r lies at unit u ^ (r % 8).
__device__ void CopySwizzled(const uint32_t* from, uint32_t* to) {
  constexpr int kWordsPerUnit = 4;
  for (int i = static_cast<int>(threadIdx.x); i < kTileRows * kPairs; i += kThreads) {
    const int row = i / kPairs;
    const int unit = i % kPairs / kWordsPerUnit;
    to[row * 32 + (unit ^ (row % 8)) * kWordsPerUnit + i % kWordsPerUnit] = from[i];
  }
}
#endif

// Does nothing where there is no wgmma: the host asks no other card for it.
__global__ void __launch_bounds__(kThreads)
    WgmmaTiles(const uint32_t* a, const uint32_t* b, const float* c, float* d) {
#if ISOBIT_HAS_WGMMA
  __shared__ alignas(1024) uint32_t operands[2][kTileRows * 32];
  CopySwizzled(a + int64_t{blockIdx.x} * kTileRows * kPairs, operands[0]);
  CopySwizzled(b + int64_t{blockIdx.x} * kTileRows * kPairs, operands[1]);
  const int thread = static_cast<int>(threadIdx.x);
  const int row = 16 * (thread / 32) + thread % 32 / 4;
  const int64_t first = int64_t{blockIdx.x} * kStepsPerTile + row * kTileRows + 2 * (thread % 4);
  float sums[32];
  for (int i = 0; i < 32; ++i) {  // of four, two are eight rows below
    sums[i] = c[first + i % 4 / 2 * 8 * kTileRows + i / 4 * 8 + i % 2];
  }
  cuda::FenceSharedForAsync();
  __syncthreads();
  cuda::FenceMma();
  cuda::Wgmma<kTileRows>::Mma(
      sums, cuda::KMajorOperand(static_cast<uint32_t>(__cvta_generic_to_shared(operands[0]))),
      cuda::KMajorOperand(static_cast<uint32_t>(__cvta_generic_to_shared(operands[1]))), true);
  cuda::CommitMma();
  cuda::WaitMma<0>();
  for (int i = 0; i < 32; ++i) {
    d[first + i % 4 / 2 * 8 * kTileRows + i / 4 * 8 + i % 2] = sums[i];
  }
#endif
}

struct Free {
  void operator()(void* memory) const { cudaFree(memory); }
};
using DeviceBytes = std::unique_ptr<void, Free>;

absl::StatusOr<DeviceBytes> Allocate(size_t bytes) {
  void* memory = nullptr;
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaMalloc(&memory, bytes));
  return DeviceBytes(memory);
}

template <class T>
absl::StatusOr<DeviceBytes> Upload(const std::vector<T>& values) {
  const size_t bytes = values.size() * sizeof(T);
  ISOBIT_ASSIGN_OR_RETURN(DeviceBytes memory, Allocate(bytes));
  ISOBIT_RETURN_IF_CUDA_ERROR(
      cudaMemcpy(memory.get(), values.data(), bytes, cudaMemcpyHostToDevice));
  return memory;
}

using Kernel = void (*)(const uint32_t*, const uint32_t*, const float*, float*);

absl::StatusOr<std::vector<float>> Run(Kernel kernel, const CardInfo& card, const MmaSteps& steps) {
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaSetDevice(card.device));
  ISOBIT_ASSIGN_OR_RETURN(const DeviceBytes a, Upload(steps.a));
  ISOBIT_ASSIGN_OR_RETURN(const DeviceBytes b, Upload(steps.b));
  ISOBIT_ASSIGN_OR_RETURN(const DeviceBytes c, Upload(steps.c));
  std::vector<float> results(steps.c.size());
  const size_t bytes = results.size() * sizeof(float);
  ISOBIT_ASSIGN_OR_RETURN(const DeviceBytes d, Allocate(bytes));
  // A kernel that writes nothing must not pass for one that wrote what was there.
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaMemset(d.get(), 0xa5, bytes));
  kernel<<<static_cast<unsigned>(steps.steps() / kStepsPerTile), kThreads>>>(
      static_cast<const uint32_t*>(a.get()), static_cast<const uint32_t*>(b.get()),
      static_cast<const float*>(c.get()), static_cast<float*>(d.get()));
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaGetLastError());
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaMemcpy(results.data(), d.get(), bytes, cudaMemcpyDeviceToHost));
  return results;
}

}  // namespace

absl::StatusOr<std::vector<CardInfo>> ListCards() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorNoDevice) return std::vector<CardInfo>();
  if (error == cudaErrorInsufficientDriver) {  // CUDA says so also where there is no driver
    return absl::FailedPreconditionError("no NVIDIA driver, or one older than CUDA 13 needs, 580");
  }
  if (error != cudaSuccess) return cuda::CudaStatus(error, "looking for GPUs");
  std::vector<CardInfo> cards;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaGetDeviceProperties(&properties, i));
    cards.push_back({i, properties.name, properties.major, properties.minor});
  }
  return cards;
}

absl::StatusOr<std::vector<float>> RunMmaSync(const CardInfo& card, const MmaSteps& steps) {
  return Run(MmaSyncTiles, card, steps);
}

absl::StatusOr<std::vector<float>> RunWgmma(const CardInfo& card, const MmaSteps& steps) {
  if (!card.is_hopper()) {
    return absl::FailedPreconditionError(absl::StrCat(
        card.name, " has compute capability ", card.major, ".", card.minor, ", wgmma needs 9.0"));
  }
  return Run(WgmmaTiles, card, steps);
}

}  // namespace isobit
