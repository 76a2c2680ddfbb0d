// Engines over a tiny model on GPUs; without a GPU a test is skipped.
#ifndef ISOBIT_TESTS_ROLLOUT_ENGINE_CUDA_ENGINE_FIXTURE_H_
#define ISOBIT_TESTS_ROLLOUT_ENGINE_CUDA_ENGINE_FIXTURE_H_

#include <cuda_runtime_api.h>

#include <iostream>

#include "gtest/gtest.h"
#include "kernels/cuda/sm90/device/device_info.h"
#include "kernels/runtime/cuda_rank_options.h"
#include "tests/rollout/engine/engine_fixture.h"

namespace isobit {

class CudaEngineFixture : public EngineFixture {
 protected:
  void SetUp() override {
    const auto info = cuda::GetDeviceInfo(0);
    if (!info.ok()) GTEST_SKIP() << "SKIPPED, no Hopper GPU: " << info.status().message();
  }

  static bool HaveGpus(int count) {
    int num_devices = 0;
    EXPECT_EQ(cudaGetDeviceCount(&num_devices), cudaSuccess);
    if (num_devices < count) std::cout << "SKIPPED: " << count << " ranks need as many GPUs\n";
    return num_devices >= count;
  }

  static CudaRankOptions Ranks(int size, bool fast_path = false) {
    CudaRankOptions ranks;
    ranks.variant = fast_path;
    for (int r = 0; r < size; ++r) ranks.devices.push_back(r);
    return ranks;
  }
};

}  // namespace isobit

#endif  // ISOBIT_TESTS_ROLLOUT_ENGINE_CUDA_ENGINE_FIXTURE_H_
