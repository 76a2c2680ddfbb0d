// Logprobs and sampling on the GPU against the CPU backend, bit for bit: every parameter mixed with
// every kind of row, vocabularies from 1 token to 262144, ties, masks and rows that are not a
// distribution; the device interface with padding, guards, replayed graphs and streams.
#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/status_macros.h"
#include "gtest/gtest.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/sm90/log_probs/log_probs.h"
#include "kernels/cuda/sm90/log_probs/transfer.h"
#include "tests/kernels/cuda/device_case.h"
#include "tests/kernels/log_prob_cases.h"

namespace isobit::cuda {
namespace {

using testing_support::AppendBits;
using testing_support::DeviceBuffer;
using testing_support::kLogitKinds;
using testing_support::Logits;
using testing_support::LogProbCase;
using testing_support::MakeLogits;
using testing_support::OnH200;
using testing_support::Pick;
using testing_support::Random;
using testing_support::RandomLogProbCase;
using testing_support::RowBits;
using testing_support::RunLogProbs;
using testing_support::Scaled;

std::vector<RowBits> RunCpu(const std::vector<LogProbCase>& requests) {
  static const std::unique_ptr<Backend> ops =
      MakeCpuBackend({.num_threads = static_cast<int>(std::thread::hardware_concurrency())});
  return RunLogProbs(*ops, requests);
}

// The rows' logits on the GPU, with NaN before, between and after them; `gap` floats between rows
// decide their alignment.
class DeviceLogits {
 public:
  DeviceLogits(const std::vector<LogProbCase>& requests, int64_t gap)
      : ld_(static_cast<int64_t>(requests.front().logits.size()) + gap) {
    std::vector<float> all(requests.size() * static_cast<size_t>(ld_),
                           std::numeric_limits<float>::quiet_NaN());
    for (size_t i = 0; i < requests.size(); ++i) {
      std::copy(requests[i].logits.begin(), requests[i].logits.end(),
                all.begin() + static_cast<int64_t>(i) * ld_);
    }
    buffer_ = std::make_unique<DeviceBuffer<float>>(all);
  }
  const float* data() const { return buffer_->data(); }
  int64_t ld() const { return ld_; }

 private:
  const int64_t ld_;
  std::unique_ptr<DeviceBuffer<float>> buffer_;
};

class LogProbsTest : public testing::Test {
 protected:
  void SetUp() override { ISOBIT_SKIP_WITHOUT_GPU(); }

  std::vector<RowBits> RunGpu(const std::vector<LogProbCase>& requests, int64_t gap = 0) {
    const DeviceLogits logits(requests, gap);
    return RunLogProbs(requests, logits.data(), logits.ld(),
                       [this](const LogProbsArgs& args) { return transfer_.Run(args, OnH200()); });
  }

  void ExpectCpuBits(const std::vector<LogProbCase>& requests, int64_t gap = 0) {
    const std::vector<RowBits> expected = RunCpu(requests);
    const std::vector<RowBits> actual = RunGpu(requests, gap);
    int failures = 0;
    for (size_t i = 0; i < requests.size(); ++i) {
      if (actual[i] == expected[i]) continue;
      ADD_FAILURE() << "row " << i << ", " << testing_support::Describe(requests[i])
                    << "\n  actual   "
                    << testing::PrintToString(RowBits(actual[i].begin(), actual[i].begin() + 6))
                    << "\n  expected "
                    << testing::PrintToString(
                           RowBits(expected[i].begin(), expected[i].begin() + 6));
      if (++failures == 5) break;
    }
    rows_ += requests.size();
  }

  // The same for requests without filters and top lists, whose logits are split into ranges as over
  // `num_ranks` ranks.
  void ExpectCpuBitsByRanges(const std::vector<LogProbCase>& requests, int num_ranks, int64_t gap) {
    const auto num_rows = static_cast<int64_t>(requests.size());
    const auto vocab = static_cast<int64_t>(requests.front().logits.size());
    const contract::LeafPlan plan = contract::PlanColumns(vocab);
    const auto ranks = static_cast<size_t>(num_ranks);
    const size_t each = contract::kLeaves / ranks;
    std::vector<std::unique_ptr<DeviceLogits>> logits;
    std::vector<std::unique_ptr<DeviceBuffer<unsigned char>>> buffers;
    std::vector<LogProbTransfer> transfers(ranks);
    RankRangeResults results{.num_ranks = num_ranks};
    for (size_t r = 0; r < ranks; ++r) {
      std::vector<LogProbCase> mine = requests;
      for (LogProbCase& request : mine) {
        const auto begin = request.logits.begin();
        request.logits = {begin + plan.bounds[r * each], begin + plan.bounds[(r + 1) * each]};
      }
      logits.push_back(std::make_unique<DeviceLogits>(mine, gap));
      buffers.push_back(std::make_unique<DeviceBuffer<unsigned char>>(
          static_cast<int64_t>(RangeResultBytes(num_rows, static_cast<int>(each)))));
      results.of_rank[r] = reinterpret_cast<const std::byte*>(buffers.back()->data());
    }
    const auto run = [&](const LogProbsArgs& args) -> absl::Status {
      DeviceLogProbs sent;
      for (size_t r = 0; r < ranks; ++r) {
        LogProbsArgs mine = args;
        mine.logits = logits[r]->data();
        mine.ld = logits[r]->ld();
        ISOBIT_ASSIGN_OR_RETURN(sent, transfers[r].Send(mine, nullptr, OnH200()));
        ISOBIT_RETURN_IF_ERROR(LaunchRangeResults(
            sent, {.first = static_cast<int>(r * each), .count = static_cast<int>(each)},
            reinterpret_cast<std::byte*>(buffers[r]->data()), OnH200()));
      }
      ISOBIT_RETURN_IF_ERROR(LaunchJoinLogProbs(sent, results, OnH200()));
      ISOBIT_RETURN_IF_ERROR(transfers.back().Fetch(args, OnH200()));
      ISOBIT_CHECK_CUDA(cudaDeviceSynchronize());
      transfers.back().Read(args);
      return absl::OkStatus();
    };
    EXPECT_EQ(RunLogProbs(requests, nullptr, 0, run), RunCpu(requests))
        << "vocabulary of " << vocab << ", " << num_ranks << " ranks";
    for (const auto& buffer : buffers) EXPECT_TRUE(buffer->GuardsIntact());
    rows_ += requests.size();
  }

  void TearDown() override {
    if (rows_ > 0) std::printf("[  ROWS    ] %zu compared\n", rows_);
  }

  size_t rows_ = 0;
  LogProbTransfer transfer_;
};

// The share of the requests that Scaled leaves.
std::vector<LogProbCase> Share(std::vector<LogProbCase> requests, Random& random) {
  std::shuffle(requests.begin(), requests.end(), random);
  requests.resize(static_cast<size_t>(Scaled(static_cast<int>(requests.size()))));
  return requests;
}

TEST_F(LogProbsTest, RandomRequestsSmallVocab) {
  Random random(1);
  for (const int64_t vocab : {1, 2, 3, 15, 16, 17, 63, 64, 100, 127, 128, 129, 130, 257, 1000}) {
    std::vector<LogProbCase> requests;
    for (int i = 0; i < Scaled(200); ++i) requests.push_back(RandomLogProbCase(vocab, random));
    ExpectCpuBits(requests, static_cast<int64_t>(random() % 5));
  }
}

TEST_F(LogProbsTest, RandomRequestsMiddleVocab) {
  Random random(2);
  for (const int64_t vocab : {4096, 5003, 16383, 16400, 32000, 50257}) {
    std::vector<LogProbCase> requests;
    for (int i = 0; i < Scaled(60); ++i) requests.push_back(RandomLogProbCase(vocab, random));
    ExpectCpuBits(requests, vocab % 4 == 0 ? 0 : 3);
  }
}

TEST_F(LogProbsTest, RandomRequestsLargeVocab) {
  Random random(3);
  for (const int64_t vocab : {128256, 151936, 151936, 200001, 262144}) {
    std::vector<LogProbCase> requests;
    for (int i = 0; i < Scaled(40); ++i) requests.push_back(RandomLogProbCase(vocab, random));
    ExpectCpuBits(requests);
  }
}

TEST_F(LogProbsTest, EveryKindUnderEveryFilter) {
  Random random(4);
  for (const Logits kind : kLogitKinds) {
    ExpectCpuBits(Share(testing_support::EveryFilter(kind, 8000, random), random));
  }
}

TEST_F(LogProbsTest, LongTopLists) {
  Random random(5);
  std::vector<LogProbCase> requests;
  for (const Logits kind : kLogitKinds) {
    for (const int32_t top : {512, 513, 1000, kMaxTopLogProbs}) {
      LogProbCase r;
      r.logits = MakeLogits(kind, 9000, random);
      r.top_logprobs = top;
      r.sampling.top_k = random() % 2 == 0 ? 700 : 0;
      r.raw = random() % 3 == 0;
      requests.push_back(std::move(r));
    }
  }
  requests = Share(std::move(requests), random);
  ExpectCpuBits(requests);
  requests.resize(1);
  requests[0].logits.resize(600);  // fewer tokens than wanted
  ExpectCpuBits(requests);
}

TEST_F(LogProbsTest, ManyDrawsOfFlatAndPeakedRows) {
  Random random(6);
  for (const Logits kind : {Logits::kFlat, Logits::kPeaked, Logits::kModel, Logits::kEqual}) {
    std::vector<LogProbCase> requests;
    const std::vector<float> logits = MakeLogits(kind, 3000, random);
    for (uint32_t i = 0; i < static_cast<uint32_t>(Scaled(700)); ++i) {
      LogProbCase r;
      r.logits = logits;
      r.sampling.seed = 11;
      r.sampling.position = i;
      requests.push_back(std::move(r));
    }
    ExpectCpuBits(requests);
  }
}

TEST_F(LogProbsTest, NonFiniteRows) {
  Random random(7);
  size_t num_sound = 0;
  const std::vector<LogProbCase> requests = testing_support::NonFiniteCases(random, &num_sound);
  ExpectCpuBits(requests);
  const std::vector<RowBits> bits = RunGpu(requests);
  for (size_t i = 0; i < bits.size(); ++i) EXPECT_EQ(bits[i][0], i + num_sound >= bits.size()) << i;
}

TEST_F(LogProbsTest, EveryTargetOfASmallRow) {
  Random random(8);
  std::vector<LogProbCase> requests;
  const std::vector<float> logits = MakeLogits(Logits::kTied, 300, random);
  for (int32_t target = 0; target < 300; ++target) {
    for (const int32_t top_k : {0, 40}) {
      LogProbCase r;
      r.logits = logits;
      r.target = target;
      r.sampling.top_k = top_k;
      requests.push_back(std::move(r));
    }
  }
  ExpectCpuBits(Share(std::move(requests), random), 1);
}

TEST_F(LogProbsTest, RowsByRanges) {
  Random random(9);
  for (const int64_t vocab : {1, 2, 17, 100, 130, 1000, 5003, 32000, 50257, 151936}) {
    std::vector<LogProbCase> requests;
    for (int i = 0; i < Scaled(vocab < 10000 ? 100 : 30); ++i) {
      LogProbCase r = RandomLogProbCase(vocab, random);
      r.sampling.top_k = 0;
      r.sampling.top_p = 1.0f;
      r.sampling.min_p = 0.0f;
      r.top_logprobs = 0;
      requests.push_back(std::move(r));
    }
    for (const int num_ranks : {1, 2, 4, 8}) {
      ExpectCpuBitsByRanges(requests, num_ranks, 1 + static_cast<int64_t>(random() % 4));
    }
  }
}

TEST_F(LogProbsTest, RejectsWhatItCannotHold) {
  LogProbRequest request;
  LogProbResult result;
  LogProbsArgs args = {.requests = &request, .results = &result, .num_rows = 1, .vocab = 5000};
  request.top_logprobs = kMaxTopLogProbs + 1;
  EXPECT_EQ(transfer_.Run(args, OnH200()).code(), absl::StatusCode::kInvalidArgument);
  request.top_logprobs = 0;
  args.vocab = kMaxDeviceVocab + 1;
  EXPECT_EQ(transfer_.Run(args, OnH200()).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(transfer_.Run({.vocab = 5000}, OnH200()).ok());
}

// ---- The device interface

constexpr int64_t kVocab = 20000;
constexpr int32_t kTop = 6;

// A batch in GPU memory: plain, greedy, filtered, scored and padding rows.
class Batch {
 public:
  explicit Batch(int64_t rows, uint64_t seed)
      : rows_(rows),
        logits_(rows * kVocab),
        device_rows_(rows),
        results_(rows),
        ids_(rows),
        top_(rows * kTop),
        workspace_(static_cast<int64_t>(LogProbWorkspaceBytes(rows))) {
    ISOBIT_CHECK_CUDA(cudaMemset(workspace_.data(), 0, LogProbWorkspaceBytes(rows)));
    Fill(seed);
  }

  // New contents at the same addresses.
  void Fill(uint64_t seed) {
    Random random(seed);
    requests_.clear();
    std::vector<float> logits;
    std::vector<DeviceLogProbRow> rows;
    for (int64_t i = 0; i < rows_; ++i) {
      LogProbCase r;
      r.logits = MakeLogits(Pick(kLogitKinds, random), kVocab, random);
      r.sampling.seed = random();
      r.sampling.temperature = Pick({0.0f, 1.0f, 0.8f}, random);
      if (i % 3 == 1) r.sampling.top_p = 0.9f;
      if (i % 3 == 2) r.top_logprobs = static_cast<int32_t>(random() % (kTop + 1));
      if (i % 4 == 3) r.target = static_cast<int32_t>(random() % kVocab);
      DeviceLogProbRow row{.logits = i % 5 == 4 ? nullptr : logits_.data() + i * kVocab,
                           .seed = r.sampling.seed,
                           .temperature = r.sampling.temperature,
                           .top_p = r.sampling.top_p,
                           .target = r.target,
                           .top_logprobs = r.top_logprobs,
                           .want_entropy = true};
      rows.push_back(row);
      logits.insert(logits.end(), r.logits.begin(), r.logits.end());
      requests_.push_back(std::move(r));
    }
    logits_.CopyIn(logits);
    device_rows_.CopyIn(rows);
    results_.Poison();
    ids_.Poison();
    top_.Poison();
  }

  DeviceLogProbs Args() {
    return {.rows = device_rows_.data(),
            .num_rows = rows_,
            .vocab = kVocab,
            .results = results_.data(),
            .ids = ids_.data(),
            .top = top_.data(),
            .top_stride = kTop,
            .workspace = reinterpret_cast<std::byte*>(workspace_.data())};
  }

  void ExpectCpuBits() {
    const std::vector<RowBits> expected = RunCpu(requests_);
    const std::vector<DeviceLogProbResult> results = results_.CopyOut();
    const std::vector<int32_t> ids = ids_.CopyOut();
    const std::vector<TokenLogProb> top = top_.CopyOut();
    for (int64_t i = 0; i < rows_; ++i) {
      const auto at = static_cast<size_t>(i);
      const DeviceLogProbResult& result = results[at];
      RowBits bits = {static_cast<uint32_t>(result.finite),
                      std::bit_cast<uint32_t>(result.entropy)};
      AppendBits({result.id, result.logprob}, &bits);
      if (i % 5 == 4) {  // padding
        EXPECT_EQ(bits, RowBits(4, ~0u)) << i;
        EXPECT_EQ(ids[at], -1) << i;
        continue;
      }
      EXPECT_EQ(ids[at], result.id) << i;
      for (int32_t t = 0; t < kTop; ++t) {
        const TokenLogProb& token = top[at * kTop + static_cast<size_t>(t)];
        if (t < requests_[at].top_logprobs) {
          AppendBits(token, &bits);
        } else {
          EXPECT_EQ(token.id, -1) << i;
          EXPECT_EQ(std::bit_cast<uint32_t>(token.logprob), ~0u) << i;
        }
      }
      EXPECT_EQ(bits, expected[at]) << i;
    }
    EXPECT_TRUE(logits_.GuardsIntact() && device_rows_.GuardsIntact() && results_.GuardsIntact() &&
                ids_.GuardsIntact() && top_.GuardsIntact() && workspace_.GuardsIntact());
  }

 private:
  int64_t rows_;
  std::vector<LogProbCase> requests_;
  DeviceBuffer<float> logits_;
  DeviceBuffer<DeviceLogProbRow> device_rows_;
  DeviceBuffer<DeviceLogProbResult> results_;
  DeviceBuffer<int32_t> ids_;
  DeviceBuffer<TokenLogProb> top_;
  DeviceBuffer<unsigned char> workspace_;
};

using DeviceLogProbsTest = testing_support::GpuTest;

TEST_F(DeviceLogProbsTest, MixedBatchesOfManySizes) {
  for (const int64_t rows : {1, 2, 7, Scaled(33), Scaled(150)}) {
    Batch batch(rows, 20 + static_cast<uint64_t>(rows));
    ASSERT_TRUE(LaunchLogProbs(batch.Args(), OnH200()).ok());
    batch.ExpectCpuBits();
  }
}

TEST_F(DeviceLogProbsTest, WorkspaceServesBatchesOfOtherSizes) {
  Batch large(5 * Scaled(8), 30);
  Batch small(3, 31);
  for (int round = 0; round < 3; ++round) {
    DeviceLogProbs args = small.Args();
    args.workspace = large.Args().workspace;
    ASSERT_TRUE(LaunchLogProbs(args, OnH200()).ok());
    ASSERT_TRUE(LaunchLogProbs(large.Args(), OnH200()).ok());
  }
  small.ExpectCpuBits();
  large.ExpectCpuBits();
}

TEST_F(DeviceLogProbsTest, RepeatedRunsOnSeveralStreams) {
  constexpr int kStreams = 4;
  std::vector<std::unique_ptr<Batch>> batches;
  cudaStream_t streams[kStreams];
  for (int i = 0; i < kStreams; ++i) {
    batches.push_back(std::make_unique<Batch>(4 * Scaled(5), 40 + static_cast<uint64_t>(i)));
    ISOBIT_CHECK_CUDA(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
  }
  ISOBIT_CHECK_CUDA(cudaDeviceSynchronize());
  for (int round = 0; round < Scaled(50); ++round) {
    for (int i = 0; i < kStreams; ++i) {
      ASSERT_TRUE(LaunchLogProbs(batches[static_cast<size_t>(i)]->Args(),
                                 OnH200(streams[i], round % 2 == 0))
                      .ok());
    }
  }
  for (int i = 0; i < kStreams; ++i) {
    batches[static_cast<size_t>(i)]->ExpectCpuBits();
    ISOBIT_CHECK_CUDA(cudaStreamDestroy(streams[i]));
  }
}

TEST_F(DeviceLogProbsTest, ReplayedGraphReadsWhatTheArraysHoldThen) {
  Batch batch(5 * Scaled(9), 50);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  ISOBIT_CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  ISOBIT_CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  ASSERT_TRUE(LaunchLogProbs(batch.Args(), OnH200(stream)).ok());
  ASSERT_TRUE(LaunchLogProbs(batch.Args(), OnH200(stream)).ok());
  ISOBIT_CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  ISOBIT_CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int round = 0; round < Scaled(4); ++round) {
    batch.Fill(60 + static_cast<uint64_t>(round));
    ISOBIT_CHECK_CUDA(cudaDeviceSynchronize());
    for (int i = 0; i < 3; ++i) ISOBIT_CHECK_CUDA(cudaGraphLaunch(exec, stream));
    ISOBIT_CHECK_CUDA(cudaStreamSynchronize(stream));
    batch.ExpectCpuBits();
  }
  ISOBIT_CHECK_CUDA(cudaGraphExecDestroy(exec));
  ISOBIT_CHECK_CUDA(cudaGraphDestroy(graph));
  ISOBIT_CHECK_CUDA(cudaStreamDestroy(stream));
}

}  // namespace
}  // namespace isobit::cuda
