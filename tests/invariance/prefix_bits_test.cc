// Cold, warm, shared and alone: a sample's tokens and logprobs have the same bits however its
// prompt was computed, in every configuration of the CPU.
#include <vector>

#include "gtest/gtest.h"
#include "tests/invariance/prefix_bits_fixture.h"
#include "tests/invariance/service_bits_fixture.h"

namespace isobit::invariance {
namespace {

class PrefixBitsTest : public PrefixBitsFixture {};

TEST_P(PrefixBitsTest, PageSizes) {
  for (const int32_t page_size : {1, 4, 16, 128}) {
    SCOPED_TRACE(page_size);
    ExpectTheBitsOfAlone({.page_size = page_size}, Groups(4));
  }
}

TEST_P(PrefixBitsTest, TensorParallelSizes) {
  for (const int size : {2, 4}) {
    SCOPED_TRACE(size);
    ExpectTheBitsOfAlone({.tp_size = size, .page_size = 4}, Groups(3));
  }
}

TEST_P(PrefixBitsTest, SamplesPerPrompt) {
  ExpectTheBitsOfAlone({.page_size = 4}, Groups(1));
  ExpectTheBitsOfAlone({.page_size = 4, .max_running = 8}, Groups(11));
  ExpectTheBitsOfAlone({.cache_fraction = 0.0, .page_size = 4}, Groups(3));
}

TEST_P(PrefixBitsTest, EqualPromptsInOneStep) {
  std::vector<GenerationRequest> requests = Groups(2);
  for (GenerationRequest request : Groups(2)) {
    request.id += " again";
    *request.sampling.seed += 1;
    requests.push_back(std::move(request));
  }
  ExpectTheBitsOfAlone({.page_size = 4}, requests);
}

TEST_P(PrefixBitsTest, FewPages) {
  const auto engine = MakeEngine({.page_size = 4, .num_pages = 40});
  const std::vector<GenerationRequest> requests = Groups(6);
  const std::vector<PrefixSamples> first = Run(*engine, requests);
  EXPECT_EQ(first, Alone(requests));
  EXPECT_GT(Preemptions(first), 0u) << "the test must exercise preemption";
  EXPECT_EQ(Run(*engine, requests), Alone(requests));
}

TEST_P(PrefixBitsTest, TheWarmFindWhatTheyHad) {
  const auto engine = MakeEngine({.page_size = 16});
  const std::vector<GenerationRequest> requests = Groups(2);
  const std::vector<PrefixSamples> cold = Run(*engine, {requests.back()});
  EXPECT_EQ(cold[0][0].num_cached, 0u);
  EXPECT_EQ(cold[0][1].num_cached, 64u) << "by the other sample";
  EXPECT_EQ(Run(*engine, {requests.back()})[0][0].num_cached, 48u) << "but for the last page";
  GenerationRequest turn = NextTurn(requests.back(), cold[0]);
  EXPECT_EQ(Run(*engine, {turn})[0][0].num_cached, 64u);
  EXPECT_EQ(engine->load().prompts.all, 4 * 64 + 2 * static_cast<int64_t>(turn.prompt.size()));

  const auto without = MakeEngine({.share = false});
  EXPECT_EQ(MostCached(Run(*without, requests)), 0u);
  EXPECT_EQ(MostCached(Run(*without, requests)), 0u);
  EXPECT_EQ(without->load().num_cached_pages, 0);
}

TEST_P(PrefixBitsTest, SeveralSplitsOfAttention) {
  ExpectTheBitsOfAlone({.max_positions = 2048}, LongGroups(2));
}

// Each mode keeps this much of what it promises: a row's bits do not depend on its company.
TEST_P(PrefixBitsTest, BatchInvariantMode) {
  const std::vector<GenerationRequest> requests = Groups(3);
  const auto without = MakeEngine({.share = false, .mode = NumericsMode::kBatchInvariant});
  const auto engine = MakeEngine({.mode = NumericsMode::kBatchInvariant, .page_size = 4});
  const std::vector<PrefixSamples> expected = Run(*without, requests);
  EXPECT_EQ(Run(*engine, requests), expected);
  EXPECT_EQ(Run(*engine, requests), expected);
}

INSTANTIATE_TEST_SUITE_P(Architectures, PrefixBitsTest, testing::ValuesIn(ServiceBitsModels()),
                         ServiceBitsName);

}  // namespace
}  // namespace isobit::invariance
