// What the tests of sums over ranks share: the devices of the ranks, and operands made on the GPU.
#ifndef ISOBIT_TESTS_KERNELS_CUDA_COLLECTIVE_ALL_REDUCE_CASE_CUH_
#define ISOBIT_TESTS_KERNELS_CUDA_COLLECTIVE_ALL_REDUCE_CASE_CUH_

#include <cstdint>
#include <cstdlib>
#include <vector>

#include "kernels/contract/portable.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/system_memory.cuh"
#include "tests/kernels/cuda/device_case.h"

namespace isobit::cuda {

using contract::Bf16;

// Ranks that share a GPU wait for each other's kernels. So their streams may not share a hardware
// queue, and no kernel may be loaded while another runs, because loading waits for the device.
inline const bool kEnvironment = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1) == 0 &&
                                 setenv("CUDA_MODULE_LOADING", "EAGER", 1) == 0;

// The devices of `ranks` ranks: once all on the first device and, if there are more devices, once
// spread over them.
inline std::vector<std::vector<int>> Placements(int ranks) {
  int count = 0;
  ISOBIT_CHECK_CUDA(cudaGetDeviceCount(&count));
  std::vector<std::vector<int>> placements = {std::vector<int>(static_cast<size_t>(ranks), 0)};
  if (count > 1) {
    placements.emplace_back();
    for (int r = 0; r < ranks; ++r) placements.back().push_back(r % count);
  }
  return placements;
}

__device__ inline uint32_t Mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// A pure function of rank, step and index: exponents over 24 binades, zeros of both signs, and half
// of the columns cancelling between the halves of the ranks.
__device__ inline float PartialOf(int rank, int ranks, uint32_t step, uint32_t i) {
  const uint32_t c = Mix(i ^ Mix(step + 0xabcdefu));
  const bool cancels = (c & 1) != 0 && rank >= ranks / 2;
  const int like = cancels ? rank - ranks / 2 : rank;
  const uint32_t b = Mix(i * 0x9e3779b1u ^ Mix(step * 8 + static_cast<uint32_t>(like) + 1));
  uint32_t v =
      (b & 0x80000000u) | (115 + ((b >> 23 & 0xff) * 25 >> 8)) << 23 | b * 0x9e3779b1u >> 9;
  if ((c >> 8 & 0xff) == 0) v &= 0x80000000u;
  if (cancels) v ^= 0x80000000u;
  return contract::FromBits(v);
}
__device__ inline Bf16 ResidualOf(uint32_t step, uint32_t i) {
  const uint32_t b = Mix(i ^ Mix(step + 0x777u));
  return static_cast<Bf16>((b & 0x8000u) | (121 + (b & 0xff) * 13 / 256) << 7 | (b >> 8 & 0x7f));
}

// Makes the partial and the residual of step *step after up to `delay` nanoseconds. Lets its
// successor start at once.
inline __global__ void __launch_bounds__(256)
    Generate(float* partial, Bf16* residual, const uint32_t* step, int rank, int ranks, uint32_t n,
             uint32_t delay) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const uint32_t now = *step;
  if (delay > 0) {
    const uint64_t begin = GlobalTimer();
    const uint32_t wait = Mix(now * 8 + static_cast<uint32_t>(rank)) % delay;
    while (GlobalTimer() - begin < wait) {
    }
  }
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    partial[i] = PartialOf(rank, ranks, now, i);
    residual[i] = ResidualOf(now, i);
  }
}

__device__ inline uint64_t DigestOf(uint32_t i, Bf16 x) {
  uint64_t v = (uint64_t{i} << 16 | x) + 1;
  v = (v ^ v >> 30) * 0xbf58476d1ce4e5b9ull;
  v = (v ^ v >> 27) * 0x94d049bb133111ebull;
  return v ^ v >> 31;
}

}  // namespace isobit::cuda

#endif  // ISOBIT_TESTS_KERNELS_CUDA_COLLECTIVE_ALL_REDUCE_CASE_CUH_
