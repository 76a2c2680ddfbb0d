// The fast path of ranks on GPUs: its steps change no bit of the others, which compute its rows
// again, with graphs and without, at several parallel sizes, after updates and after sleep; it has
// numerics of its own and the weights that serve; either path's draws may begin the other's step.
#include <algorithm>
#include <cstdint>
#include <iostream>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "common/base/status_macros.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/model/prepare_weights.h"
#include "kernels/runtime/cuda_executor.h"
#include "tests/rollout/engine/cuda_engine_fixture.h"
#include "tests/rollout/engine/engine_fixture.h"
#include "tests/rollout/engine/step_rows.h"
#include "tests/support/bitwise.h"
#include "tests/support/status_matchers.h"
#include "tests/support/tiny_model.h"

namespace isobit {
namespace {

using testing_support::BitwiseEqual;
using testing_support::StatusIs;

class FastPathCudaTest : public CudaEngineFixture {
 protected:
  // Sums of few terms have the same bfloat16 keys whichever way they are taken.
  FastPathCudaTest() {
    config_.num_layers = 4;
    config_.hidden_size = 512;
    config_.intermediate_size = 1024;
    testing_support::WriteTinyModel(config_, 1, root_.File("v1"));
    testing_support::WriteTinyModel(config_, 2, root_.File("v2"));
  }

  ModelRunnerOptions OnGpus(const CudaRankOptions& ranks) const {
    ModelRunnerOptions options = DefaultOptions().runner;
    options.tensor_parallel_size = static_cast<int>(ranks.devices.size());
    options.make_rank = MakeCudaRank(ranks);
    return options;
  }

  ResultsOfRows RunOn(const CudaRankOptions& ranks, const RowsRun& rows,
                      const std::string& model = "v1") const {
    return RunRows(config_, root_.path(), model, OnGpus(ranks), rows);
  }

  absl::StatusOr<std::unique_ptr<ModelRunner>> Serve(const CudaRankOptions& ranks) const {
    ISOBIT_ASSIGN_OR_RETURN(auto runner, ModelRunner::Create(config_, OnGpus(ranks),
                                                             /*max_sequences=*/8, /*max_rows=*/64));
    ResidentStore store = runner->NewStore();
    ISOBIT_RETURN_IF_ERROR(
        PrepareWeights({root_.path()}, {.model_path = "v1"}, config_, store).status());
    ISOBIT_RETURN_IF_ERROR(runner->Serve(store.Take()));
    return runner;
  }
};

// INVARIANT: steps of the fast path change no bit of those that compute their rows again.
TEST_F(FastPathCudaTest, FastStepsChangeNoBitOfTheOthers) {
  const ResultsOfRows expected =
      RunRows(config_, root_.path(), "v1", DefaultOptions().runner, {.rows_of_step = 1});
  for (const int size : {1, 2, 4}) {
    if (!HaveGpus(size)) break;
    for (const auto& [graphs, peer_memory] :
         {std::pair(true, true), std::pair(false, true), std::pair(true, false)}) {
      CudaRankOptions ranks = Ranks(size, /*fast_path=*/true);
      ranks.use_graphs = graphs;
      ranks.peer_memory = peer_memory;
      ranks.overlap_rows = 2;
      ranks.max_guesses = 7;
      SCOPED_TRACE(testing::Message()
                   << size << " ranks, graphs " << graphs << ", peer memory " << peer_memory);
      ResultsOfRows fast;
      for (const int64_t rows : {1, 8}) {
        EXPECT_TRUE(SameResults(RunOn(ranks, {.rows_of_step = rows, .fast = &fast}), expected))
            << rows << " rows";
        EXPECT_FALSE(SameResults(fast, expected)) << "the same numerics, " << rows << " rows";
        EXPECT_GT(ShareOfSameDraws(fast, expected), 0.8) << rows << " rows";
        std::cout << size << " ranks, graphs " << graphs << ", peer memory " << peer_memory << ", "
                  << rows << " rows: " << ShareOfSameDraws(fast, expected)
                  << " of the fast draws are the others'\n";
      }
      EXPECT_FALSE(SameResults(RunOn(ranks, {.fast = &fast, .fast_last = true}), expected))
          << "control";
    }
  }
}

TEST_F(FastPathCudaTest, HasTheWeightsThatServe) {
  const ResultsOfRows expected =
      RunRows(config_, root_.path(), "v1", DefaultOptions().runner, {.rows_of_step = 1});
  for (const int size : {1, 2}) {
    if (!HaveGpus(size)) break;
    for (const bool graphs : {true, false}) {
      CudaRankOptions ranks = Ranks(size, /*fast_path=*/true);
      ranks.use_graphs = graphs;
      SCOPED_TRACE(testing::Message() << size << " ranks, graphs " << graphs);
      ResultsOfRows first;
      RunOn(ranks, {.fast = &first});
      for (const bool sleeps : {false, true}) {
        ResultsOfRows fast;
        EXPECT_TRUE(SameResults(RunOn(ranks, {.fast = &fast, .replaced = "v2", .sleeps = sleeps}),
                                expected));
        EXPECT_TRUE(SameResults(fast, first)) << "sleeps " << sleeps;
      }
      ResultsOfRows other;
      RunOn(ranks, {.fast = &other}, "v2");
      EXPECT_LT(ShareOfSameDraws(other, expected), 0.5) << "control: other weights";
    }
  }
}

// Ids that a step draws begin the next one before the host knows them, whichever path the two take.
TEST_F(FastPathCudaTest, DrawsOfEitherPathFeedTheOther) {
  constexpr int kSteps = 9;
  const std::vector<int32_t> prompt = {3, 14, 15, 92, 65, 35, 8, 9, 79, 32, 3};
  const auto vocab = static_cast<int32_t>(config_.vocab_size);
  const auto first_position = static_cast<int64_t>(prompt.size());
  std::vector<int32_t> pages(8);
  std::iota(pages.begin(), pages.end(), 0);
  for (const int size : {1, 2}) {
    if (!HaveGpus(size)) break;
    for (const bool graphs : {true, false}) {
      SCOPED_TRACE(testing::Message() << size << " ranks, graphs " << graphs);
      CudaRankOptions ranks = Ranks(size, /*fast_path=*/true);
      ranks.use_graphs = graphs;
      ISOBIT_ASSERT_OK_AND_ASSIGN(const std::unique_ptr<ModelRunner> runner, Serve(ranks));
      const auto step_at = [&](int64_t position, std::vector<int32_t> ids, bool fed, bool fast) {
        ModelStep step;
        const auto rows = static_cast<int64_t>(ids.size());
        step.batch = {.ids = std::move(ids), .sequences = {{0, rows, position, pages.data()}}};
        step.feeds = {fed ? 0 : -1};
        step.logit_rows = {rows - 1};
        LogProbRequest& request = step.requests.emplace_back();
        request.sampling.temperature = 0;
        request.sampling.position = static_cast<uint32_t>(position + rows);
        step.results.resize(1);
        step.variant = fast;
        return step;
      };
      // The prompt, then the paths in turn. fed: the ids come from the GPU, two steps in flight.
      const auto run = [&](bool fed, int32_t added) {
        std::vector<LogProbResult> results;
        std::vector<ModelStep> steps = {step_at(0, prompt, false, false)};
        steps.reserve(kSteps);  // steps in flight stay where they are
        ISOBIT_EXPECT_OK(runner->Launch(steps.back()));
        for (int i = 1; i < kSteps; ++i) {
          if (!fed) {
            ISOBIT_EXPECT_OK(runner->Collect(steps.back()));
          }
          const int32_t id = fed ? 0 : (steps.back().results[0].token.id + added) % vocab;
          steps.push_back(step_at(first_position + i - 1, {id}, fed, i % 2 == 1));
          ISOBIT_EXPECT_OK(runner->Launch(steps.back()));
          if (fed) {
            ISOBIT_EXPECT_OK(runner->Collect(steps[steps.size() - 2]));
          }
        }
        ISOBIT_EXPECT_OK(runner->Collect(steps.back()));
        for (const ModelStep& step : steps) results.push_back(step.results[0]);
        return results;
      };
      const auto same = [](const std::vector<LogProbResult>& a,
                           const std::vector<LogProbResult>& b) {
        return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                          [](const LogProbResult& x, const LogProbResult& y) {
                            return x.finite && y.finite && x.token.id == y.token.id &&
                                   BitwiseEqual(x.token.logprob, y.token.logprob);
                          });
      };
      const auto given = run(/*fed=*/false, /*added=*/0);
      EXPECT_TRUE(same(run(/*fed=*/true, /*added=*/0), given));
      EXPECT_FALSE(same(run(/*fed=*/false, /*added=*/1), given)) << "control: other tokens";
    }
  }
}

TEST_F(FastPathCudaTest, CountsItsWeightsAndGivesThemBack) {
  for (const int size : {1, 2}) {
    if (!HaveGpus(size)) break;
    ISOBIT_ASSERT_OK_AND_ASSIGN(const auto with, Serve(Ranks(size, /*fast_path=*/true)));
    ISOBIT_ASSERT_OK_AND_ASSIGN(const auto without, Serve(Ranks(size)));
    EXPECT_GT(with->memory().weights, without->memory().weights);
    EXPECT_GE(with->memory().activations, without->memory().activations);
    ISOBIT_ASSERT_OK(with->Release(/*weights=*/true).status());
    EXPECT_EQ(with->memory().weights, 0u);
  }
}

TEST_F(FastPathCudaTest, IsRefusedWhereThereIsNone) {
  ISOBIT_ASSERT_OK_AND_ASSIGN(const auto runner, Serve(Ranks(1)));
  ModelStep step;
  step.variant = true;
  EXPECT_THAT(runner->Launch(step),
              StatusIs(absl::StatusCode::kInvalidArgument, testing::HasSubstr("no variant pass")));
}

// Needs no GPU.
class FastPathModesTest : public EngineFixture {};

TEST_F(FastPathModesTest, StandsBesideModeTreeAlone) {
  for (const NumericsMode mode : {NumericsMode::kBatchInvariant, NumericsMode::kVanilla}) {
    ModelRunnerOptions options = DefaultOptions().runner;
    options.tensor_parallel_size = 1;
    options.mode = mode;
    options.make_rank = MakeCudaRank({.devices = {0}, .variant = true});
    EXPECT_THAT(ModelRunner::Create(config_, options, 8, 64).status(),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         testing::HasSubstr("beside numerics tree alone")));
  }
}

}  // namespace
}  // namespace isobit
