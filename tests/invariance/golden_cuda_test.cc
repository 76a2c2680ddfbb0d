// The CUDA backend against the golden bits (golden.h) and, in schedules that mix prompts, decode
// steps and batches, against the CPU backend's logits. All ranks share one GPU.
#include <filesystem>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/cuda_backend.h"
#include "tests/invariance/forward_harness.h"
#include "tests/invariance/golden.h"
#include "tests/invariance/tiny_models.h"
#include "tests/support/bitwise.h"
#include "tests/support/test_name.h"

namespace isobit::invariance {
namespace {

Schedule OnGpu(NumericsMode mode = NumericsMode::kTree) {
  Schedule schedule;
  schedule.make_ops = [mode] { return CudaBackend::Create({.mode = mode}).value(); };
  return schedule;
}

class GoldenCudaTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (const auto ops = CudaBackend::Create({}); !ops.ok()) {
      GTEST_SKIP() << "SKIPPED, no Hopper GPU: " << ops.status().message();
    }
    if (!std::filesystem::exists(GoldenModelDirectory(GetParam()) + "/config.json")) {
      GTEST_SKIP() << GoldenModelDirectory(GetParam())
                   << " is not there: python -m isobit.convert.smollm2 makes it";
    }
  }
};

// INVARIANT: a GPU computes the CPU's bits, at every tensor-parallel size.
TEST_P(GoldenCudaTest, DigestsHoldAtEveryTensorParallelSize) {
  const ForwardHarness model(GoldenModelDirectory(GetParam()));
  const Tokens tokens = GoldenTokens(GetParam(), model);
  for (const int tp_size : {1, 2, 4, 8}) {
    Schedule schedule = OnGpu();
    schedule.tp_size = tp_size;
    schedule.page_size = 64;
    EXPECT_EQ(DigestsOf(model, tokens, model.Run({tokens}, schedule)[0], *OnGpu().make_ops()),
              GoldenDigests(GetParam()))
        << "TP " << tp_size;
  }
}

// INVARIANT: prompt lengths, decode steps, batches and page sizes change no bit on a GPU.
TEST_P(GoldenCudaTest, SchedulesGiveTheCpuBackendsLogits) {
  const ForwardHarness model(GoldenModelDirectory(GetParam()));
  std::vector<Tokens> sequences;
  for (const int64_t length : {61, 1, 40, 17, 130}) {
    sequences.push_back(model.RandomTokens(length, static_cast<uint32_t>(length)));
  }
  Schedule cpu;
  cpu.make_ops = [] { return MakeCpuBackend({}); };
  const std::vector<SequenceLogits> expected = model.Run(sequences, cpu);
  for (const int64_t prefill : {0, 1, 33}) {
    for (const int32_t page_size : {1, 16, 128}) {
      Schedule gpu = OnGpu();
      gpu.prefill = prefill;
      gpu.page_size = page_size;
      gpu.scatter_pages = true;
      const std::vector<SequenceLogits> actual = model.Run(sequences, gpu);
      for (size_t s = 0; s < sequences.size(); ++s) {
        EXPECT_TRUE(testing_support::BitwiseEqual(actual[s], expected[s]))
            << "prefill " << prefill << ", page size " << page_size << ", sequence " << s;
      }
    }
  }
}

// A control: cuBLAS and a ring of bf16 sums give other bits, near the contract's.
TEST_P(GoldenCudaTest, VanillaDiffersButNotMuch) {
  const ForwardHarness model(GoldenModelDirectory(GetParam()));
  const Tokens tokens = model.RandomTokens(40, 6);
  const SequenceLogits expected = model.Run({tokens}, OnGpu())[0];
  Schedule schedule = OnGpu(NumericsMode::kVanilla);
  schedule.tp_size = 4;
  const SequenceLogits actual = model.Run({tokens}, schedule)[0];
  double difference = 0.0;
  double size = 0.0;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    size += expected[i] * expected[i];
  }
  EXPECT_FALSE(testing_support::BitwiseEqual(actual, expected));
  EXPECT_LT(difference, 0.01 * size);
}

TEST(GoldenRowCudaTest, ManyWeights) {
  const auto ops = CudaBackend::Create({});
  if (!ops.ok()) GTEST_SKIP() << "SKIPPED, no Hopper GPU: " << ops.status().message();
  EXPECT_EQ(ManyWeightsDigest(**ops), GoldenDigests("many-weights"));
}

INSTANTIATE_TEST_SUITE_P(Models, GoldenCudaTest, testing::ValuesIn(GoldenNames()),
                         testing_support::TestName);

}  // namespace
}  // namespace isobit::invariance
