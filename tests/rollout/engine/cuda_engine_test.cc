// The engine on GPUs gives the CPU engine's tokens and logprobs, bit for bit, at every
// tensor-parallel size, with and without graphs, whatever runs beside a request. Skips sizes that
// need more GPUs than the machine has.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/runtime/cuda_executor.h"
#include "kernels/runtime/step_graphs.h"
#include "tests/rollout/engine/cuda_engine_fixture.h"
#include "tests/rollout/engine/engine_fixture.h"
#include "tests/rollout/engine/step_rows.h"
#include "tests/support/bitwise.h"
#include "tests/support/faulty_rank.h"
#include "tests/support/status_matchers.h"
#include "tests/support/trap_gpu.h"

namespace isobit {
namespace {

using testing::HasSubstr;
using testing_support::StatusIs;

class CudaEngineTest : public CudaEngineFixture {
 protected:
  EngineOptions OnGpus(const CudaRankOptions& ranks) const {
    EngineOptions options = DefaultOptions();
    options.runner.tensor_parallel_size = static_cast<int>(ranks.devices.size());
    options.runner.make_rank = MakeCudaRank(ranks);
    return options;
  }

  // Requests of every kind, some of several samples.
  static std::vector<GenerationRequest> Requests() {
    std::vector<GenerationRequest> requests;
    for (uint64_t i = 0; i < 9; ++i) {
      GenerationRequest request = MakeRequest(std::string(1, static_cast<char>('a' + i)), 100 + i);
      for (uint64_t t = 0; t < 7 * i; ++t) {
        request.prompt.push_back((t * 13 + i) % 50);
      }
      request.sampling.max_tokens = static_cast<uint32_t>(5 + 3 * i);
      if (i % 3 == 1) request.sampling.top_k = 5;
      if (i % 3 == 2) request.sampling.top_p = 0.8f;
      if (i % 4 == 3) request.sampling.presence_penalty = 0.5f;
      if (i == 4) request.sampling.temperature = 0.0f;
      if (i == 5) request.sampling.n = 3;
      if (i % 2 == 0) request.sampling.logprobs = 4;
      requests.push_back(std::move(request));
    }
    return requests;
  }

  static std::vector<std::shared_ptr<RecordingSink>> RunAll(Engine& engine) {
    std::vector<std::shared_ptr<RecordingSink>> sinks;
    for (const GenerationRequest& request : Requests()) sinks.push_back(Submit(engine, request));
    Run(engine);
    return sinks;
  }

  static void ExpectSame(const std::vector<std::shared_ptr<RecordingSink>>& actual,
                         const std::vector<std::shared_ptr<RecordingSink>>& expected) {
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) {
      SCOPED_TRACE(i);
      ASSERT_EQ(actual[i]->samples.size(), expected[i]->samples.size());
      for (const auto& [index, sample] : expected[i]->samples) {
        const SampleResult& got = actual[i]->samples.at(index);
        ExpectSameTokens(got, sample);
        ASSERT_EQ(got.top.size(), sample.top.size());
        for (size_t t = 0; t < got.top.size(); ++t) {
          ASSERT_EQ(got.top[t].size(), sample.top[t].size());
          for (size_t k = 0; k < got.top[t].size(); ++k) {
            EXPECT_EQ(got.top[t][k].id, sample.top[t][k].id);
            EXPECT_TRUE(
                testing_support::BitwiseEqual(std::vector<float>{got.top[t][k].logprob},
                                              std::vector<float>{sample.top[t][k].logprob}));
          }
        }
      }
    }
  }
};

TEST_F(CudaEngineTest, GivesTheBitsOfTheCpuAtEveryParallelSize) {
  const auto expected = RunAll(*MakeEngine());
  for (const int size : {1, 2, 4, 8}) {
    if (!HaveGpus(size)) break;
    for (const bool graphs : {true, false}) {
      SCOPED_TRACE(testing::Message() << size << " ranks, graphs " << graphs);
      CudaRankOptions ranks = Ranks(size);
      ranks.use_graphs = graphs;
      ExpectSame(RunAll(*MakeEngine(OnGpus(ranks))), expected);
    }
  }
}

// Micro-batch overlap from two rows on.
TEST_F(CudaEngineTest, OverlappedSumsChangeNoBit) {
  const auto expected = RunAll(*MakeEngine());
  for (const int size : {2, 4, 8}) {
    if (!HaveGpus(size)) break;
    for (const bool graphs : {true, false}) {
      SCOPED_TRACE(testing::Message() << size << " ranks, graphs " << graphs);
      CudaRankOptions ranks = Ranks(size);
      ranks.use_graphs = graphs;
      ranks.overlap_rows = 2;
      ExpectSame(RunAll(*MakeEngine(OnGpus(ranks))), expected);
    }
  }
}

TEST_F(CudaEngineTest, NcclInPlaceOfPeerMemoryChangesNoBit) {
  const auto expected = RunAll(*MakeEngine());
  for (const int size : {2, 4}) {
    if (!HaveGpus(size)) break;
    CudaRankOptions ranks = Ranks(size);
    ranks.peer_memory = false;
    SCOPED_TRACE(size);
    ExpectSame(RunAll(*MakeEngine(OnGpus(ranks))), expected);
  }
}

// A probe sees on GPUs what it sees on CPUs, whatever carries the sums, and leaves graphs and
// requests in flight as they were.
TEST_F(CudaEngineTest, ProbesSeeWhatTheyDoOnTheCpu) {
  const std::vector<int32_t> tokens = {3, 14, 15, 92, 65, 35, 8, 9, 79, 32, 3};
  const ProbeWanted wanted = {.site = ProbeSite{1, ProbeOp::kAttention}, .row = 7};
  const ProbeReport expected = Probe(*MakeEngine(), tokens, wanted)->report;
  EXPECT_EQ(expected.digests.size(), 3 + 12 * static_cast<size_t>(config_.num_layers));
  EXPECT_FALSE(expected.values.empty());
  const auto sampled = RunAll(*MakeEngine());
  for (const int size : {1, 2, 4, 8}) {
    if (!HaveGpus(size)) break;
    for (const bool peer_memory : {true, false}) {
      SCOPED_TRACE(testing::Message() << size << " ranks, peer memory " << peer_memory);
      CudaRankOptions ranks = Ranks(size);
      ranks.peer_memory = peer_memory;
      ranks.overlap_rows = 2;
      const auto engine = MakeEngine(OnGpus(ranks));
      std::vector<std::shared_ptr<RecordingSink>> sinks;
      for (const GenerationRequest& request : Requests()) sinks.push_back(Submit(*engine, request));
      engine->Step();
      const absl::StatusOr<ProbeResult> result = Probe(*engine, tokens, wanted);
      ISOBIT_ASSERT_OK(result.status());
      EXPECT_EQ(result->report, expected);
      std::vector<int32_t> others = tokens;
      others.front() += 1;
      EXPECT_NE(Probe(*engine, others, wanted)->report, expected) << "control";
      Run(*engine);
      ExpectSame(sinks, sampled);
    }
  }
}

// A control test: a mode that does not keep the contract differs.
TEST_F(CudaEngineTest, VanillaRunsAndHasOtherBits) {
  const auto expected = RunAll(*MakeEngine());
  for (const int size : {1, 4}) {
    if (!HaveGpus(size)) break;
    EngineOptions options = OnGpus(Ranks(size));
    options.runner.mode = NumericsMode::kVanilla;
    const auto actual = RunAll(*MakeEngine(options));
    size_t num_equal = 0;
    for (size_t i = 0; i < actual.size(); ++i) {
      ISOBIT_ASSERT_OK(actual[i]->done.value());
      num_equal += testing_support::BitwiseEqual(actual[i]->samples.at(0).logprobs,
                                                 expected[i]->samples.at(0).logprobs);
    }
    EXPECT_LT(num_equal, actual.size()) << size << " ranks";
  }
}

// Graphs captured over the first weights run over the later ones, which are prepared while steps
// run.
TEST_F(CudaEngineTest, GivesTheBitsOfTheNewWeightsAfterAnUpdate) {
  const auto first = Generate(*MakeEngine(DefaultOptions(), "v1"), MakeRequest("r"));
  const auto second = Generate(*MakeEngine(DefaultOptions(), "v2"), MakeRequest("r"));
  EXPECT_FALSE(testing_support::BitwiseEqual(first.logprobs, second.logprobs))
      << "a control: the weights differ";
  for (const int size : {1, 2, 4}) {
    if (!HaveGpus(size)) break;
    SCOPED_TRACE(size);
    const auto engine = MakeEngine(OnGpus(Ranks(size)));
    for (const bool update : {true, false, true}) {
      GenerationRequest beside = MakeRequest("beside");
      beside.sampling.max_tokens = 150;
      const auto sink = Submit(*engine, beside);
      ISOBIT_ASSERT_OK(Update(
          *engine, {.model_path = update ? "v2" : "v1", .mode = InFlightMode::kRecomputeKv}));
      ExpectSameTokens(Generate(*engine, MakeRequest("r")), update ? second : first);
      EXPECT_EQ(sink->done, absl::OkStatus());
    }
  }
}

TEST_F(CudaEngineTest, AFullGpuTakesItsUpdateFromTheHost) {
  const auto expected = Generate(*MakeEngine(DefaultOptions(), "v2"), MakeRequest("r"));
  const auto engine = MakeEngine(OnGpus(Ranks(1)));
  Generate(*engine, MakeRequest("warm"));  // scratch grows before the memory is gone
  size_t free = 0;
  size_t total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  void* hog = nullptr;
  constexpr size_t kLeft = size_t{600} << 20;
  ASSERT_GT(free, kLeft);
  ASSERT_EQ(cudaMalloc(&hog, free - kLeft), cudaSuccess);
  const absl::StatusOr<WeightUpdateResult> updated = Update(*engine, {.model_path = "v2"});
  EXPECT_EQ(cudaFree(hog), cudaSuccess);
  ISOBIT_ASSERT_OK(updated.status());
  ExpectSameTokens(Generate(*engine, MakeRequest("r")), expected);
}

TEST_F(CudaEngineTest, FewPagesChangeNoBit) {
  const auto expected = RunAll(*MakeEngine());
  EngineOptions options = OnGpus(Ranks(HaveGpus(2) ? 2 : 1));
  options.runner.num_pages = 24;
  ExpectSame(RunAll(*MakeEngine(options)), expected);
}

// More sequences in a step than the largest graph has.
TEST_F(CudaEngineTest, StepsBeyondTheGraphsGiveTheSameBits) {
  constexpr int kSequences = kMaxGraphSequences + 40;
  EngineOptions options = DefaultOptions();
  options.runner.num_pages = 4 * kSequences;
  options.scheduler = {.max_running = kSequences, .max_batch_tokens = 6 * kSequences};
  const auto run = [&](Engine& engine) {
    std::vector<std::shared_ptr<RecordingSink>> sinks;
    for (uint64_t i = 0; i < kSequences; ++i) {
      sinks.push_back(Submit(engine, MakeRequest(std::to_string(i), i)));
    }
    Run(engine);
    return sinks;
  };
  const auto expected = run(*MakeEngine(options));
  for (const int size : {1, 2}) {
    if (!HaveGpus(size)) break;
    SCOPED_TRACE(size);
    options.runner.tensor_parallel_size = size;
    options.runner.make_rank = MakeCudaRank(Ranks(size));
    ExpectSame(run(*MakeEngine(options)), expected);
  }
}

// INVARIANT: rows of a sequence in a step; with wrong guesses some rows' logits are not asked for.
TEST_F(CudaEngineTest, ManyRowsOfASequenceGiveTheBitsOfSingleOnes) {
  const auto run = [&](const EngineOptions& options, const RowsRun& rows) {
    return RunRows(config_, root_.path(), "v1", options.runner, rows);
  };
  const ResultsOfRows expected = run(DefaultOptions(), {.rows_of_step = 1});
  for (const int size : {1, 2}) {
    if (!HaveGpus(size)) break;
    for (const int64_t rows : {1, 2, 3, 8}) {
      for (const int32_t wrong : {0, 3}) {
        EXPECT_TRUE(SameResults(
            run(OnGpus(Ranks(size)), {.rows_of_step = rows, .wrong_guesses = wrong}), expected))
            << rows << " rows, " << wrong << " wrong guesses, TP " << size;
      }
    }
    EXPECT_FALSE(
        SameResults(run(OnGpus(Ranks(size)), {.rows_of_step = 2, .wrong_context = true}), expected))
        << "control";
  }
}

// Steps follow each other on the stream, so their parts add up to less than the run's time.
TEST_F(CudaEngineTest, TimesThePartsOfStepsAndChangesNoBit) {
  const auto expected = RunAll(*MakeEngine());
  for (const int size : {1, 2}) {
    if (!HaveGpus(size)) break;
    for (const bool graphs : {true, false}) {
      SCOPED_TRACE(testing::Message() << size << " ranks, graphs " << graphs);
      CudaRankOptions ranks = Ranks(size);
      ranks.use_graphs = graphs;
      EngineOptions options = OnGpus(ranks);
      const auto engine = MakeEngine(options);
      const StepTimes& times = engine->step_times();
      EXPECT_EQ(times.device_seconds(DevicePart::kForward), 0) << "before the first step";
      const auto begin = std::chrono::steady_clock::now();
      ExpectSame(RunAll(*engine), expected);
      const double wall =
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      const double forward = times.device_seconds(DevicePart::kForward);
      const double draw = times.device_seconds(DevicePart::kDraw);
      std::cout << size << " ranks, graphs " << graphs << ": " << times.num_steps() << " steps, "
                << 1e6 * forward << " us forward and " << 1e6 * draw << " us draw of " << 1e6 * wall
                << " us\n";
      EXPECT_GT(forward, 0);
      EXPECT_GT(draw, 0);
      EXPECT_LT(forward + draw, wall);
      EXPECT_GT(forward + draw, 0.001 * wall) << "in seconds";
      options.runner.time_steps = false;
      const auto untimed = MakeEngine(options);
      ExpectSame(RunAll(*untimed), expected);
      EXPECT_EQ(untimed->step_times().device_seconds(DevicePart::kForward), 0) << "control";
    }
  }
}

TEST_F(CudaEngineTest, CountsTheMemoryOfLogits) {
  for (const int size : {1, 2}) {
    if (!HaveGpus(size)) break;
    const auto activations = [&](size_t max_running) {
      EngineOptions options = OnGpus(Ranks(size));
      options.scheduler = {.max_running = max_running, .max_batch_tokens = 2000};
      return MakeEngine(options)->memory().activations;
    };
    // With two ranks each has its columns of all rows, and its half of the rows whole.
    EXPECT_GE(activations(1016),
              activations(16) + 1000 * static_cast<size_t>(config_.vocab_size) * sizeof(float));
  }
}

// What an engine takes of its GPUs, beside what it has reported, stays within what a rank sets
// aside for graphs and code; and with as many KV pages as fit it takes no more than its fraction.
TEST_F(CudaEngineTest, TakesNoMoreThanItsFraction) {
  const auto free_bytes = [](int device) {
    size_t free = 0;
    size_t total = 0;
    EXPECT_EQ(cudaSetDevice(device), cudaSuccess);
    EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
    return free;
  };
  for (const int size : {1, 2}) {
    if (!HaveGpus(size)) break;
    for (const auto& [peer_memory, fast_path] :
         {std::pair(true, false), std::pair(false, false), std::pair(true, true)}) {
      CudaRankOptions ranks = Ranks(size);
      ranks.peer_memory = peer_memory;
      ranks.variant = fast_path;
      ranks.memory_fraction = 0.2;
      EngineOptions options = OnGpus(ranks);
      options.runner.num_pages = 0;
      options.runner.page_size = 512;
      options.runner.max_positions = 1 << 19;
      options.scheduler = {.max_running = 512, .max_batch_tokens = 4096};
      std::vector<size_t> before;
      for (int device = 0; device < size; ++device) before.push_back(free_bytes(device));
      const auto engine = MakeEngine(options);
      double fullest = 0;  // control: the pages fill the GPU of the rank with the most heads
      for (int device = 0; device < size; ++device) {
        const size_t free = before[static_cast<size_t>(device)];
        const size_t taken = free - free_bytes(device);
        const double limit = 0.2 * static_cast<double>(free);
        std::cout << size << " ranks, peer memory " << peer_memory << ", fast path " << fast_path
                  << ": " << engine->options().runner.num_pages << " pages, " << taken
                  << " bytes taken, " << engine->memory().total() << " reported, " << limit
                  << " allowed\n";
        EXPECT_LE(static_cast<double>(taken), limit);
        fullest = std::max(fullest, static_cast<double>(taken) / limit);
        EXPECT_LE(taken, engine->memory().total() + (size_t{2} << 30));
      }
      EXPECT_GT(fullest, 0.9);
    }
  }
}

TEST_F(CudaEngineTest, SaysThatNoPageFits) {
  CudaRankOptions ranks = Ranks(1);
  ranks.memory_fraction = 0.01;  // less than a rank sets aside
  EngineOptions options = OnGpus(ranks);
  options.runner.num_pages = 0;
  EXPECT_THAT(Engine::Create(config_, options).status(),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("no KV page")));
}

// With decode graphs, and with steps in halves.
class CudaEngineFaultTest : public CudaEngineTest, public testing::WithParamInterface<bool> {};

TEST_P(CudaEngineFaultTest, AFaultOnOneGpuEndsTheEngine) {
  if (!HaveGpus(2)) GTEST_SKIP() << "SKIPPED, needs two GPUs";
  // In a process of its own, since the GPU's context is lost.
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        CudaRankOptions ranks = Ranks(2);
        ranks.peer_timeout = absl::Seconds(1);
        if (GetParam()) ranks.overlap_rows = 2;
        EngineOptions options = OnGpus(ranks);
        options.runner.make_rank = testing_support::WithFault(
            options.runner.make_rank,
            {.rank = 1, .step = GetParam() ? 0 : 3, .happen = [device = ranks.devices[1]] {
               return testing_support::TrapGpu(device);
             }});
        absl::Status failure;
        options.on_failure = [&](const absl::Status& status) { failure = status; };
        auto engine = MakeEngine(options);
        const auto sink = Submit(*engine, MakeRequest("a"));
        Run(*engine);
        const bool ended = sink->done && !sink->done->ok() && !failure.ok();
        fprintf(stderr, "%s\n", failure.ToString().c_str());
        _exit(ended ? 7 : 1);
      },
      testing::ExitedWithCode(7), "");
}

INSTANTIATE_TEST_SUITE_P(Halves, CudaEngineFaultTest, testing::Bool());

TEST(GraphSizesTest, AscendsToTheMostAndPadsToLessThanTwice) {
  for (int64_t most = 1; most <= kMaxGraphSequences; ++most) {
    const std::vector<int64_t> ladder = GraphSizes(most);
    ASSERT_EQ(ladder.front(), 1);
    ASSERT_EQ(ladder.back(), most);
    ASSERT_EQ(std::adjacent_find(ladder.begin(), ladder.end(), std::greater_equal<>()),
              ladder.end());
    for (int64_t size = 1; size <= most; ++size) {
      ASSERT_LT(*std::lower_bound(ladder.begin(), ladder.end(), size), 2 * size) << most;
    }
  }
}

// Every graph takes memory, for which a rank sets a fixed amount aside (cuda_executor.cc).
TEST(GraphSizesTest, EndsWhereGraphsStopPaying) {
  EXPECT_EQ(GraphSizes(65535), GraphSizes(kMaxGraphSequences));
  EXPECT_LE(GraphSizes(65535).size(), 32u);
}

}  // namespace
}  // namespace isobit
