// Guesses on GPUs change no bit either: with graphs and without, at several parallel sizes, the
// results are those of the CPU backend without guesses.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <iostream>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/runtime/cuda_executor.h"
#include "kernels/runtime/step_graphs.h"
#include "tests/rollout/guesses/speculation_fixture.h"

namespace isobit {
namespace {

class SpeculationCudaTest : public SpeculationFixture {
 protected:
  static bool HaveGpus(int count) {
    int num_devices = 0;
    if (cudaGetDeviceCount(&num_devices) != cudaSuccess) num_devices = 0;
    if (num_devices < count) std::cout << "SKIPPED: " << count << " ranks need as many GPUs\n";
    return num_devices >= count;
  }
};
INSTANTIATE_TEST_SUITE_P(Samples, SpeculationCudaTest, testing::Values(1),
                         testing::PrintToStringParamName());

// INVARIANT: guesses on GPUs.
TEST_P(SpeculationCudaTest, EveryDrafterGivesTheBitsOfTheCpuWithoutGuesses) {
  if (!HaveGpus(1)) GTEST_SKIP() << "no GPU";
  constexpr size_t kGuesses = 8;
  for (const uint32_t samples : {1u, 3u}) {
    std::vector<GenerationRequest> requests = AllParameters(samples, 40);
    EngineOptions options = DefaultOptions();
    options.scheduler.max_running = 128;
    options.runner.num_pages = 600;
    const Results expected = RunAll(options, requests);
    const auto script = ScriptOf(requests, expected);
    for (const int size : {1, 2, 4}) {
      if (!HaveGpus(size)) break;
      for (const bool graphs : {true, false}) {
        CudaRankOptions ranks;
        for (int r = 0; r < size; ++r) ranks.devices.push_back(r);
        ranks.use_graphs = graphs;
        ranks.max_guesses = kGuesses;
        options.runner.tensor_parallel_size = size;
        options.runner.make_rank = MakeCudaRank(ranks);
        for (const double right : {0.0, 0.5, 0.9, 1.0}) {
          Comparison all;
          // All at once, then one by one: few and many sequences in a graph.
          Compare(expected, RunAll(WithGuesses(options, script, Mixed(right), kGuesses), requests),
                  all);
          for (size_t r = 0; r < requests.size(); ++r) {
            Compare({expected[r]},
                    RunAll(WithGuesses(options, script, Mixed(right), kGuesses), {requests[r]}),
                    all);
          }
          EXPECT_TRUE(all.same()) << size << " ranks, graphs " << graphs << ", right " << right;
          EXPECT_GT(all.draft_tokens, 0);
          std::printf(
              "%d ranks, graphs %d, right %.1f: %ld tokens compared, %ld differ; %ld "
              "guesses, %ld tokens by right ones\n",
              size, graphs, right, all.tokens, all.different, all.draft_tokens, all.accepted);
        }
      }
    }
  }
}

TEST(GuessGraphShapesTest, AscendAndFitTheDraws) {
  for (const int64_t most : {1, 8, 30, 64, 128, 512}) {
    int64_t last = 0;
    for (const GraphShape& shape : GuessGraphShapes(most, 8)) {
      EXPECT_GT(shape.rows, last);
      EXPECT_LE(shape.rows, most);
      EXPECT_EQ(shape.rows_of_sequence, 9);
      EXPECT_EQ(shape.sequences, shape.rows);
      last = shape.rows;
    }
  }
  EXPECT_TRUE(GuessGraphShapes(7, 8).empty());
}

}  // namespace
}  // namespace isobit
