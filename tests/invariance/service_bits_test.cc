// The services' half of the invariance matrix: the same requests through the rollout engine and the
// scorer, in every configuration, must give the same tokens and the same logprob bits. Dimensions:
// tensor-parallel size, number of concurrent requests, page size, preemption, threads, instruction
// set; shards, packing, order. Each has a control.
#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/invariance/service_bits_fixture.h"

namespace isobit::invariance {
namespace {

class ServiceBitsTest : public ServiceBitsFixture {};

// INVARIANT: tensor-parallel size.
TEST_P(ServiceBitsTest, TensorParallelSize) {
  const std::vector<Completion> expected = Generate({});
  for (const int tp_size : {2, 4, 8}) {
    EXPECT_TRUE(Equal(Generate({.tp_size = tp_size}), expected)) << "TP " << tp_size;
  }
  EXPECT_FALSE(Equal(Generate({.tp_size = 4, .mode = NumericsMode::kBatchInvariant}), expected))
      << "control";
}

// INVARIANT: batch: 1, 3 or 16 requests at a time.
TEST_P(ServiceBitsTest, Company) {
  const std::vector<Completion> expected = Generate({.tp_size = 4});
  const auto in_groups_of = [this](const RolloutSetup& setup, size_t size) {
    std::vector<Completion> completions;
    for (size_t first = 0; first < requests_.size(); first += size) {
      const size_t count = std::min(size, requests_.size() - first);
      for (Completion& completion : Generate(setup, first, count))
        completions.push_back(std::move(completion));
    }
    return completions;
  };
  EXPECT_TRUE(Equal(in_groups_of({.tp_size = 4}, 1), expected));
  EXPECT_TRUE(Equal(in_groups_of({.tp_size = 4}, 3), expected));
  const RolloutSetup vanilla = {.tp_size = 4, .mode = NumericsMode::kVanilla};
  EXPECT_FALSE(Equal(in_groups_of(vanilla, 1), Generate(vanilla))) << "control";
}

// INVARIANT: page size and preemption: recomputing a sequence changes no bit.
TEST_P(ServiceBitsTest, PagesAndPreemption) {
  const std::vector<Completion> expected = Generate({});
  for (const int32_t page_size : {1, 7, 64}) {
    EXPECT_TRUE(Equal(Generate({.page_size = page_size, .num_pages = 2048}), expected))
        << "page size " << page_size;
  }
  const RolloutSetup scarce = {.tp_size = 2, .page_size = 4, .num_pages = 90};
  const std::vector<Completion> preempted = Generate(scarce);
  uint32_t num_preemptions = 0;
  for (const Completion& completion : preempted) num_preemptions += completion.num_preemptions;
  EXPECT_GT(num_preemptions, 0u);
  EXPECT_TRUE(Equal(preempted, expected));

  RolloutSetup vanilla = scarce;
  vanilla.mode = NumericsMode::kVanilla;
  const std::vector<Completion> spoiled = Generate(vanilla);
  vanilla.num_pages = 2048;
  EXPECT_FALSE(Equal(spoiled, Generate(vanilla))) << "control";
}

// INVARIANT: threads and instruction sets.
TEST_P(ServiceBitsTest, ThreadsAndInstructionSets) {
  const std::vector<Completion> expected = Generate({});
  for (const cpu::Isa isa : {cpu::Isa::kPortable, cpu::Isa::kAvx2, cpu::Isa::kAvx512}) {
    if (isa > cpu::DetectIsa()) continue;
    for (const int threads : {1, 2}) {
      EXPECT_TRUE(Equal(Generate({.cpu = {.isa = isa, .num_threads = threads}}), expected))
          << cpu::IsaName(isa) << ", " << threads << " threads";
    }
  }
  EXPECT_FALSE(Equal(Generate({.spoiled = true}), expected)) << "control";
}

// INVARIANT: the scorer's bits are the rollout's, over shards, packing and order.
TEST_P(ServiceBitsTest, ScoringEqualsSampling) {
  const std::vector<Completion> sampled = Generate({.tp_size = 4});
  for (const int shards : {1, 2, 3, 4, 8}) {
    EXPECT_TRUE(Equal(Score(sampled, {.shards = shards}), sampled)) << shards << " shards";
  }
  EXPECT_FALSE(Equal(Score(sampled, {.shards = 3, .spoiled = true}), sampled)) << "control";
  for (const int64_t max_batch_tokens : {1, 60, 4096}) {
    for (const bool reversed : {false, true}) {
      const ScorerSetup setup = {
          .shards = 2, .max_batch_tokens = max_batch_tokens, .reversed = reversed};
      EXPECT_TRUE(Equal(Score(sampled, setup), sampled))
          << max_batch_tokens << (reversed ? " reversed" : "");
    }
  }
  // Controls: an ordinary engine's packing moves bits, and its sampler and scorer differ.
  const std::vector<Completion> vanilla = Generate({.tp_size = 4, .mode = NumericsMode::kVanilla});
  const std::vector<Completion> alone =
      Score(vanilla, {.mode = NumericsMode::kVanilla, .max_batch_tokens = 1});
  EXPECT_FALSE(Equal(alone, vanilla));
  EXPECT_FALSE(
      Equal(alone, Score(vanilla, {.mode = NumericsMode::kVanilla, .max_batch_tokens = 4096})));
}

INSTANTIATE_TEST_SUITE_P(Architectures, ServiceBitsTest, testing::ValuesIn(ServiceBitsModels()),
                         ServiceBitsName);

}  // namespace
}  // namespace isobit::invariance
