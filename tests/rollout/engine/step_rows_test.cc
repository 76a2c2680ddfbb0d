// Several rows of a sequence in one step give what single rows give, bit for bit, on the ranks of
// the CPU backend and of its scalar definition, and whatever their fast path computes in between.
#include "tests/rollout/engine/step_rows.h"

#include <functional>
#include <memory>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/oracle/oracle_backend.h"
#include "kernels/runtime/host_executor.h"
#include "tests/rollout/engine/deferred_executor.h"
#include "tests/rollout/engine/engine_fixture.h"

namespace isobit {
namespace {

class StepRowsTest : public EngineDepthFixture {
 protected:
  ResultsOfRows Run(int tp_size, const RowsRun& run,
                    NumericsMode mode = NumericsMode::kTree) const {
    return Run([mode] { return MakeCpuBackend({.mode = mode}); }, tp_size, run);
  }
  ResultsOfRows Run(std::function<std::unique_ptr<Backend>()> make_ops, int tp_size,
                    const RowsRun& run) const {
    ModelRunnerOptions options = DefaultOptions().runner;
    options.tensor_parallel_size = tp_size;
    options.make_rank = RankOf(std::move(make_ops));
    return RunRows(config_, root_.path(), "v1", options, run);
  }
};
INSTANTIATE_TEST_SUITE_P(Depth, StepRowsTest, testing::Values(1, 2),
                         testing::PrintToStringParamName());

// INVARIANT: rows of a sequence in a step.
TEST_P(StepRowsTest, ManyRowsOfASequenceGiveTheBitsOfSingleOnes) {
  const ResultsOfRows expected = Run(1, {.rows_of_step = 1});
  ASSERT_EQ(expected.size(), 3u);
  EXPECT_EQ(expected[0].size(), 23u);
  for (const int tp_size : {1, 4}) {
    for (const int64_t rows : {1, 2, 3, 8}) {
      EXPECT_TRUE(SameResults(Run(tp_size, {.rows_of_step = rows}), expected))
          << rows << " rows, TP " << tp_size;
    }
  }
  // Controls: another context; a mode in which a row depends on those beside it.
  EXPECT_FALSE(SameResults(Run(1, {.rows_of_step = 2, .wrong_context = true}), expected));
  EXPECT_FALSE(SameResults(Run(1, {.rows_of_step = 8}, NumericsMode::kVanilla),
                           Run(1, {.rows_of_step = 1}, NumericsMode::kVanilla)));
}

TEST_P(StepRowsTest, OfTheScalarDefinitionToo) {
  const ResultsOfRows expected = Run(1, {.rows_of_step = 1});
  for (const int64_t rows : {1, 3, 8}) {
    EXPECT_TRUE(
        SameResults(Run([] { return MakeOracleBackend(); }, 2, {.rows_of_step = rows}), expected))
        << rows;
  }
}

// INVARIANT: a rejected guess changes nothing: the next step overwrites its keys.
TEST_P(StepRowsTest, WrongGuessesChangeNoBit) {
  const ResultsOfRows expected = Run(1, {.rows_of_step = 1});
  for (const int tp_size : {1, 4}) {
    for (const int64_t rows : {1, 2, 8}) {
      EXPECT_TRUE(SameResults(Run(tp_size, {.rows_of_step = rows, .wrong_guesses = 3}), expected))
          << rows << " rows, TP " << tp_size;
    }
  }
}

// INVARIANT: steps of the fast path change no bit of those that compute their rows again.
TEST_P(StepRowsTest, FastStepsChangeNoBitOfTheOthers) {
  const ResultsOfRows expected = Run(1, {.rows_of_step = 1});
  const MakeRank host =
      MakeHostRank([] { return MakeCpuBackend({}); }, /*kv_bytes=*/0,
                   [] { return MakeCpuBackend({.mode = NumericsMode::kVanilla}); });
  for (const int tp_size : {2, 4}) {
    ModelRunnerOptions options = DefaultOptions().runner;
    options.tensor_parallel_size = tp_size;
    options.make_rank = depth_ == 1 ? host : MakeDeferredRank(host);
    const auto run = [&](const RowsRun& rows, const std::string& model = "v1") {
      return RunRows(config_, root_.path(), model, options, rows);
    };
    ResultsOfRows fast;
    for (const bool sleeps : {false, true}) {
      EXPECT_TRUE(SameResults(
          run({.rows_of_step = 3, .fast = &fast, .replaced = "v2", .sleeps = sleeps}), expected))
          << "TP " << tp_size;
      EXPECT_FALSE(SameResults(fast, expected)) << "the same numerics";
      EXPECT_GT(ShareOfSameDraws(fast, expected), 0.8) << "TP " << tp_size;
    }
    EXPECT_LT(ShareOfSameDraws(run({}, "v2"), expected), 0.5) << "control";
    EXPECT_FALSE(SameResults(run({.rows_of_step = 3, .fast = &fast, .fast_last = true}), expected))
        << "control";
  }
}

}  // namespace
}  // namespace isobit
