// The services' half of the invariance matrix on GPUs: the engine's tokens and logprobs and the
// scorer's are those of the CPU, bit for bit, at every parallel size and number of shards, with
// CUDA graphs and without, through peer memory and through NCCL. Sizes for which there are too few
// GPUs are skipped with a message.
#include <cuda_runtime_api.h>

#include <iostream>
#include <numeric>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/sm90/device/device_info.h"
#include "kernels/runtime/cuda_backend.h"
#include "kernels/runtime/cuda_executor.h"
#include "tests/invariance/service_bits_fixture.h"

namespace isobit::invariance {
namespace {

class ServiceBitsCudaTest : public ServiceBitsFixture {
 protected:
  void SetUp() override {
    const auto info = cuda::GetDeviceInfo(0);
    if (!info.ok()) GTEST_SKIP() << "SKIPPED, no Hopper GPU: " << info.status().message();
    ASSERT_EQ(cudaGetDeviceCount(&num_gpus_), cudaSuccess);
  }

  // The sizes among 1, 2, 4 and 8 for which this machine has enough GPUs.
  std::vector<int> Sizes() const {
    std::vector<int> sizes;
    for (const int size : {1, 2, 4, 8}) {
      if (size <= num_gpus_) {
        sizes.push_back(size);
      } else {
        std::cout << "SKIPPED: " << size << " ranks need as many GPUs\n";
      }
    }
    return sizes;
  }

  static std::vector<int> Devices(int count) {
    std::vector<int> devices(static_cast<size_t>(count));
    std::iota(devices.begin(), devices.end(), 0);
    return devices;
  }

  static RolloutSetup OnGpus(int size) {
    return {.tp_size = size, .make_rank = MakeCudaRank({.devices = Devices(size)})};
  }

  static ScorerSetup ScoredOnGpus(int shards) {
    return {.shards = shards, .choose_backend = [shards](ScorerOptions& options) {
              const auto backend = MakeCudaBackend(
                  {.numerics = options.numerics, .devices = Devices(shards), .num_shards = shards});
              ASSERT_TRUE(backend.ok()) << backend.status();
              options.backend = *backend;
            }};
  }

 private:
  int num_gpus_ = 0;
};

// INVARIANT: tensor-parallel size, graphs, and how ranks exchange data.
TEST_P(ServiceBitsCudaTest, SamplingOnGpusEqualsTheCpus) {
  const std::vector<Completion> expected = Generate({});
  for (const int size : Sizes()) {
    for (const bool use_graphs : {true, false}) {
      for (const bool peer_memory : {true, false}) {
        RolloutSetup setup = OnGpus(size);
        // Without graphs, steps are computed in halves, too.
        setup.make_rank = MakeCudaRank({.devices = Devices(size),
                                        .peer_memory = peer_memory,
                                        .overlap_rows = use_graphs ? kOverlapRows : 2,
                                        .use_graphs = use_graphs});
        EXPECT_TRUE(Equal(Generate(setup), expected))
            << size << " ranks, graphs " << use_graphs << ", peer memory " << peer_memory;
      }
    }
  }
  RolloutSetup vanilla = OnGpus(Sizes().back());
  vanilla.mode = NumericsMode::kVanilla;
  EXPECT_FALSE(Equal(Generate(vanilla), expected)) << "control";
}

// INVARIANT: pages, preemption and the other requests in the batch.
TEST_P(ServiceBitsCudaTest, PagesPreemptionAndCompanyOnGpus) {
  const std::vector<Completion> expected = Generate({});
  const int size = Sizes().back();
  RolloutSetup scarce = OnGpus(size);
  scarce.page_size = 4;
  scarce.num_pages = 90;
  const std::vector<Completion> preempted = Generate(scarce);
  uint32_t num_preemptions = 0;
  for (const Completion& completion : preempted) num_preemptions += completion.num_preemptions;
  EXPECT_GT(num_preemptions, 0u);
  EXPECT_TRUE(Equal(preempted, expected));
  for (size_t first = 0; first < requests_.size(); first += 5) {
    const std::vector<Completion> alone = Generate(OnGpus(size), first, 1);
    EXPECT_TRUE(Equal(alone, {expected[first]})) << "request " << first << " alone";
  }
}

// INVARIANT: the scorer's bits are the rollout's, over shards.
TEST_P(ServiceBitsCudaTest, ScoringOnGpusEqualsSampling) {
  const std::vector<Completion> sampled = Generate(OnGpus(Sizes().back()));
  for (const int shards : Sizes()) {
    EXPECT_TRUE(Equal(Score(sampled, ScoredOnGpus(shards)), sampled)) << shards << " shards";
  }
  ScorerSetup vanilla = ScoredOnGpus(1);
  vanilla.mode = NumericsMode::kVanilla;
  EXPECT_FALSE(Equal(Score(sampled, vanilla), sampled)) << "control";
}

INSTANTIATE_TEST_SUITE_P(Architectures, ServiceBitsCudaTest, testing::ValuesIn(ServiceBitsModels()),
                         ServiceBitsName);

}  // namespace
}  // namespace isobit::invariance
