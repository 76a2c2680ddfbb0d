// Shared prompts on GPUs: a sample's tokens and logprobs have the bits that the CPU gives it alone,
// at every parallel size, with CUDA graphs and without, in whole steps and in halves. Sizes for
// which there are too few GPUs are skipped with a message.
#include <cuda_runtime_api.h>

#include <iostream>
#include <numeric>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/sm90/device/device_info.h"
#include "kernels/runtime/cuda_executor.h"
#include "tests/invariance/prefix_bits_fixture.h"
#include "tests/invariance/service_bits_fixture.h"

namespace isobit::invariance {
namespace {

class PrefixBitsCudaTest : public PrefixBitsFixture {
 protected:
  void SetUp() override {
    const auto info = cuda::GetDeviceInfo(0);
    if (!info.ok()) GTEST_SKIP() << "SKIPPED, no Hopper GPU: " << info.status().message();
    int num_gpus = 0;
    ASSERT_EQ(cudaGetDeviceCount(&num_gpus), cudaSuccess);
    for (const int size : {1, 2, 4}) {
      if (size <= num_gpus) {
        sizes_.push_back(size);
      } else {
        std::cout << "SKIPPED: " << size << " ranks need as many GPUs\n";
      }
    }
  }

  // In halves: every step of two rows or more, where graphs do not replay whole ones.
  static PrefixSetup OnGpus(int size, bool in_halves) {
    std::vector<int> devices(static_cast<size_t>(size));
    std::iota(devices.begin(), devices.end(), 0);
    return {.tp_size = size,
            .max_positions = 2048,
            .make_rank = MakeCudaRank({.devices = devices,
                                       .overlap_rows = in_halves ? 2 : kOverlapRows,
                                       .sharing = cuda::Sharing::kAlways,
                                       .use_graphs = !in_halves})};
  }

  std::vector<int> sizes_;
};

TEST_P(PrefixBitsCudaTest, Groups) {
  for (const int size : sizes_) {
    for (const bool in_halves : {false, true}) {
      SCOPED_TRACE(size * 10 + (in_halves ? 1 : 0));
      ExpectTheBitsOfAlone(OnGpus(size, in_halves), Groups(6));
    }
  }
}

// The samples of a group read splits of attention that lie in pages which all of them have.
TEST_P(PrefixBitsCudaTest, SeveralSplitsOfAttention) {
  for (const int size : sizes_) {
    for (const bool in_halves : {false, true}) {
      for (const int32_t page_size : {16, 128}) {
        SCOPED_TRACE(size * 1000 + page_size);
        PrefixSetup setup = OnGpus(size, in_halves);
        setup.page_size = page_size;
        ExpectTheBitsOfAlone(setup, LongGroups(8));
      }
    }
  }
}

TEST_P(PrefixBitsCudaTest, EqualPromptsInOneStep) {
  std::vector<GenerationRequest> requests = LongGroups(2);
  for (GenerationRequest request : LongGroups(2)) {
    request.id += " again";
    *request.sampling.seed += 1;
    requests.push_back(std::move(request));
  }
  for (const int size : sizes_) {
    for (const bool in_halves : {false, true}) {
      ExpectTheBitsOfAlone(OnGpus(size, in_halves), requests);
    }
  }
}

TEST_P(PrefixBitsCudaTest, FewPages) {
  PrefixSetup setup = OnGpus(1, false);
  setup.page_size = 4;
  setup.num_pages = 40;
  setup.max_positions = 160;
  const auto engine = MakeEngine(setup);
  const std::vector<GenerationRequest> requests = Groups(6);
  const std::vector<PrefixSamples> first = Run(*engine, requests);
  EXPECT_EQ(first, Alone(requests));
  EXPECT_GT(Preemptions(first), 0u) << "the test must exercise preemption";
  EXPECT_EQ(Run(*engine, requests), Alone(requests));
}

INSTANTIATE_TEST_SUITE_P(Architectures, PrefixBitsCudaTest, testing::ValuesIn(ServiceBitsModels()),
                         ServiceBitsName);

}  // namespace
}  // namespace isobit::invariance
