// Logprobs and sampling on the GPU against the CPU backend, bit for bit: every parameter mixed with
// every kind of row, vocabularies from 1 token to 262144, ties, masks and rows that are no
// distribution; the device interface with padding, guards, replayed graphs and streams.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/cuda/log_prob_stage.h"
#include "kernels/cuda/log_probs.h"
#include "tests/kernels/cpu/op_cases.h"
#include "tests/kernels/cuda/device_case.h"

namespace isobit::cuda {
namespace {

using testing_support::DeviceBuffer;
using testing_support::Random;
using testing_support::Scaled;

enum class Logits {
  kModel,  // as a language model's: a bulk, and some far above it
  kPeaked,
  kFlat,
  kTied,
  kEqual,
  kSteep,
  kSignedZeros,
  kTiny,       // exponents far below 0 of either sign
  kHuge,       // exponents far above 0
  kAscending,  // every range above the one before, the maximum last
  kTwoLevels,  // two values, one token apart from a quarter of the row
};
constexpr Logits kKinds[] = {Logits::kModel, Logits::kPeaked,    Logits::kFlat,
                             Logits::kTied,  Logits::kEqual,     Logits::kSteep,
                             Logits::kTiny,  Logits::kHuge,      Logits::kSignedZeros,
                             Logits::kModel, Logits::kAscending, Logits::kTwoLevels};

float MakeLogit(Logits kind, int64_t id, int64_t vocab, Random& random) {
  // A sum of uniforms is normal enough and far cheaper.
  const uint64_t bits = random();
  float normal = -2.0f;
  for (int i = 0; i < 4; ++i) normal += static_cast<float>(bits >> (16 * i) & 0xffff) * 0x1p-16f;
  normal *= 1.73f;
  switch (kind) {
    case Logits::kModel:
      return bits % 1000 == 0 ? 8.0f + 4.0f * normal : 2.5f * normal;
    case Logits::kPeaked:
      return 4.0f * normal;
    case Logits::kFlat:
      return 0.01f * normal;
    case Logits::kTied:
      return std::round(2.0f * normal);
    case Logits::kEqual:
      return -1.25f;
    case Logits::kSteep:
      return 60.0f * normal;
    case Logits::kSignedZeros:
      return bits % 2 == 0 ? 0.0f : -0.0f;
    case Logits::kTiny:
      return std::ldexp(normal, -static_cast<int>(bits % 160));
    case Logits::kHuge:
      return std::ldexp(normal, static_cast<int>(bits % 100));
    case Logits::kAscending:
      return 30.0f * static_cast<float>(id) / static_cast<float>(vocab);
    case Logits::kTwoLevels:
      return bits % 4 == 0 ? 3.0f : std::nextafter(3.0f, 0.0f);
  }
  return 0.0f;
}

std::vector<float> MakeLogits(Logits kind, int64_t vocab, Random& random) {
  std::vector<float> logits(static_cast<size_t>(vocab));
  for (int64_t i = 0; i < vocab; ++i) {
    logits[static_cast<size_t>(i)] = MakeLogit(kind, i, vocab, random);
  }
  return logits;
}

// One row's request, owning what RowSampling points to.
struct Request {
  RowSampling sampling;
  std::vector<TokenCount> counts;
  std::vector<TokenBias> biases;
  std::vector<int32_t> banned;
  std::vector<float> logits;
  int32_t target = -1;
  bool raw = false;
  bool want_entropy = true;
  int32_t top_logprobs = 0;
};

template <typename T, size_t kSize>
T Pick(const T (&choices)[kSize], Random& random) {
  return choices[random() % kSize];
}

Request MakeRequest(int64_t vocab, Random& random) {
  Request r;
  r.logits = MakeLogits(Pick(kKinds, random), vocab, random);
  RowSampling& s = r.sampling;
  const auto size = static_cast<int32_t>(vocab);
  s.temperature = Pick({1.0f, 1.0f, 0.0f, 0.7f, 1.3f, 0.05f, 1e-4f, 50.0f, 1e20f}, random);
  if (random() % 2 == 0) {
    s.top_k = Pick({0, 1, 2, 20, 200, 600, size / 2, size - 1, size, size + 5}, random);
    s.top_p = Pick({1.0f, 0.9f, 0.5f, 0.999f, 0.01f, 1e-9f, 0x1.fffffep-1f}, random);
    s.min_p = Pick({0.0f, 0.0f, 0.05f, 0.5f, 1.0f, 1e-6f, 1e-30f}, random);
  }
  s.seed = random();
  s.sample = static_cast<uint32_t>(random() % 3);
  s.position = static_cast<uint32_t>(random() % 100000);
  if (random() % 2 == 0) {
    s.repetition_penalty = Pick({1.0f, 1.2f, 0.8f}, random);
    s.presence_penalty = Pick({0.0f, 0.5f, -0.5f}, random);
    s.frequency_penalty = Pick({0.0f, 0.3f, -0.1f}, random);
    const int32_t step = std::max(1, size / static_cast<int32_t>(1 + random() % 300));
    for (int32_t id = static_cast<int32_t>(random() % 7); id < size; id += step) {
      r.counts.push_back({id, static_cast<int32_t>(random() % 4), random() % 2 == 0});
      if (random() % 4 == 0) r.biases.push_back({id, Pick({5.0f, -5.0f, 100.0f, -100.0f}, random)});
      if (random() % 8 == 0 && id + 1 < size && size > 2) r.banned.push_back(id + 1);
    }
  }
  if (random() % 16 == 0) {  // all but one token banned
    const auto only = static_cast<int32_t>(random() % vocab);
    r.banned.clear();
    for (int32_t id = 0; id < size; ++id) {
      if (id != only) r.banned.push_back(id);
    }
  }
  if (random() % 3 == 0) r.target = static_cast<int32_t>(random() % vocab);
  r.raw = random() % 4 == 0;
  r.want_entropy = random() % 2 == 0;
  r.top_logprobs = Pick({0, 0, 0, 1, 5, 20, 64}, random);
  if (random() % 40 == 0) {  // not a distribution
    r.logits[random() % vocab] =
        Pick({std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
              -std::numeric_limits<float>::infinity()},
             random);
  }
  return r;
}

// Outputs that no run may leave where it should have written, and none may write elsewhere.
constexpr TokenLogProb kUnset = {-7, -7.0f};

LogProbRow RowOf(const Request& r, const float* logits, std::vector<TokenLogProb>* top) {
  top->assign(static_cast<size_t>(r.top_logprobs) + 1, kUnset);
  LogProbRow row{.logits = logits,
                 .sampling = r.sampling,
                 .target = r.target,
                 .raw = r.raw,
                 .top_logprobs = r.top_logprobs,
                 .want_entropy = r.want_entropy,
                 .token = kUnset,
                 .top = top->data(),
                 .entropy = -7.0f,
                 .finite = true};
  row.sampling.counts = r.counts;
  row.sampling.biases = r.biases;
  row.sampling.banned = r.banned;
  return row;
}

using Bits = std::vector<uint32_t>;  // all outputs of a row

void AppendBits(const TokenLogProb& token, Bits* bits) {
  bits->push_back(static_cast<uint32_t>(token.id));
  bits->push_back(std::bit_cast<uint32_t>(token.logprob));
}

template <typename RunOp>
std::vector<Bits> RunRows(const std::vector<Request>& requests,
                          const std::vector<const float*>& logits, RunOp run) {
  std::vector<std::vector<TokenLogProb>> tops(requests.size());
  std::vector<LogProbRow> rows;
  for (size_t i = 0; i < requests.size(); ++i) {
    rows.push_back(RowOf(requests[i], logits[i], &tops[i]));
  }
  const absl::Status status =
      run(LogProbArgs{.rows = rows.data(),
                      .num_rows = static_cast<int64_t>(rows.size()),
                      .vocab = static_cast<int64_t>(requests.front().logits.size())});
  EXPECT_TRUE(status.ok()) << status;
  std::vector<Bits> all;
  for (size_t i = 0; i < rows.size(); ++i) {
    Bits bits = {static_cast<uint32_t>(rows[i].finite), std::bit_cast<uint32_t>(rows[i].entropy)};
    AppendBits(rows[i].token, &bits);
    for (const TokenLogProb& token : tops[i]) AppendBits(token, &bits);
    all.push_back(std::move(bits));
  }
  return all;
}

std::vector<Bits> RunCpu(const std::vector<Request>& requests) {
  static const std::unique_ptr<Ops> ops =
      MakeCpuOps({.num_threads = static_cast<int>(std::thread::hardware_concurrency())});
  std::vector<const float*> logits;
  for (const Request& r : requests) logits.push_back(r.logits.data());
  return RunRows(requests, logits, [](const LogProbArgs& args) { return ops->LogProbs(args); });
}

// The rows' logits on the GPU, with NaN before, between and after them; `gap` floats between rows
// decide their alignment.
class DeviceLogits {
 public:
  DeviceLogits(const std::vector<Request>& requests, int64_t gap) {
    const auto vocab = static_cast<int64_t>(requests.front().logits.size());
    std::vector<float> all(requests.size() * static_cast<size_t>(vocab + gap),
                           std::numeric_limits<float>::quiet_NaN());
    std::vector<int64_t> begins;
    for (size_t i = 0; i < requests.size(); ++i) {
      begins.push_back(static_cast<int64_t>(i) * (vocab + gap));
      std::copy(requests[i].logits.begin(), requests[i].logits.end(), all.begin() + begins.back());
    }
    buffer_ = std::make_unique<DeviceBuffer<float>>(all);
    for (const int64_t begin : begins) pointers_.push_back(buffer_->data() + begin);
  }
  const std::vector<const float*>& pointers() const { return pointers_; }

 private:
  std::unique_ptr<DeviceBuffer<float>> buffer_;
  std::vector<const float*> pointers_;
};

class LogProbsTest : public testing::Test {
 protected:
  void SetUp() override { ISOBIT_SKIP_WITHOUT_GPU(); }

  std::vector<Bits> RunGpu(const std::vector<Request>& requests, int64_t gap = 0) {
    const DeviceLogits logits(requests, gap);
    return RunRows(requests, logits.pointers(),
                   [this](const LogProbArgs& args) { return stage_.Run(args, Stream{}); });
  }

  void ExpectCpuBits(const std::vector<Request>& requests, int64_t gap = 0) {
    const std::vector<Bits> expected = RunCpu(requests);
    const std::vector<Bits> actual = RunGpu(requests, gap);
    int failures = 0;
    for (size_t i = 0; i < requests.size(); ++i) {
      if (actual[i] == expected[i]) continue;
      const Request& r = requests[i];
      const RowSampling& s = r.sampling;
      ADD_FAILURE() << "row " << i << ", vocab " << r.logits.size() << ", temperature "
                    << s.temperature << ", top_k " << s.top_k << ", top_p " << s.top_p << ", min_p "
                    << s.min_p << ", target " << r.target << ", raw " << r.raw << ", top "
                    << r.top_logprobs << ", lists " << r.counts.size() << " " << r.biases.size()
                    << " " << r.banned.size() << "\n  actual   "
                    << testing::PrintToString(Bits(actual[i].begin(), actual[i].begin() + 6))
                    << "\n  expected "
                    << testing::PrintToString(Bits(expected[i].begin(), expected[i].begin() + 6));
      if (++failures == 5) break;
    }
    rows_ += requests.size();
  }

  void TearDown() override {
    if (rows_ > 0) std::printf("[  ROWS    ] %zu compared\n", rows_);
  }

  size_t rows_ = 0;
  LogProbStage stage_;
};

TEST_F(LogProbsTest, RandomRequestsSmallVocab) {
  Random random(1);
  for (const int64_t vocab : {1, 2, 3, 15, 16, 17, 63, 64, 100, 127, 128, 129, 130, 257, 1000}) {
    std::vector<Request> requests;
    for (int i = 0; i < Scaled(200); ++i) requests.push_back(MakeRequest(vocab, random));
    ExpectCpuBits(requests, static_cast<int64_t>(random() % 5));
  }
}

TEST_F(LogProbsTest, RandomRequestsMiddleVocab) {
  Random random(2);
  for (const int64_t vocab : {4096, 5003, 16383, 16400, 32000, 50257}) {
    std::vector<Request> requests;
    for (int i = 0; i < Scaled(60); ++i) requests.push_back(MakeRequest(vocab, random));
    ExpectCpuBits(requests, vocab % 4 == 0 ? 0 : 3);
  }
}

TEST_F(LogProbsTest, RandomRequestsLargeVocab) {
  Random random(3);
  for (const int64_t vocab : {128256, 151936, 151936, 200001, 262144}) {
    std::vector<Request> requests;
    for (int i = 0; i < Scaled(40); ++i) requests.push_back(MakeRequest(vocab, random));
    ExpectCpuBits(requests);
  }
}

TEST_F(LogProbsTest, EveryKindUnderEveryFilter) {
  Random random(4);
  for (const Logits kind : kKinds) {
    std::vector<Request> requests;
    for (const int32_t top_k : {0, 1, 5, 300, 1500, 4000}) {
      for (const float top_p : {1.0f, 0.999f, 0.8f, 0.1f}) {
        for (const float min_p : {0.0f, 0.02f}) {
          Request r;
          r.logits = MakeLogits(kind, 8000, random);
          r.sampling.top_k = top_k;
          r.sampling.top_p = top_p;
          r.sampling.min_p = min_p;
          r.sampling.seed = random();
          r.top_logprobs = 3;
          requests.push_back(std::move(r));
        }
      }
    }
    ExpectCpuBits(requests);
  }
}

TEST_F(LogProbsTest, LongTopLists) {
  Random random(5);
  std::vector<Request> requests;
  for (const Logits kind : kKinds) {
    for (const int32_t top : {512, 513, 1000, kMaxTopLogProbs}) {
      Request r;
      r.logits = MakeLogits(kind, 9000, random);
      r.top_logprobs = top;
      r.sampling.top_k = random() % 2 == 0 ? 700 : 0;
      r.raw = random() % 3 == 0;
      requests.push_back(std::move(r));
    }
  }
  ExpectCpuBits(requests);
  requests.resize(1);
  requests[0].logits.resize(600);  // fewer tokens than wanted
  ExpectCpuBits(requests);
}

TEST_F(LogProbsTest, ManyDrawsOfFlatAndPeakedRows) {
  Random random(6);
  for (const Logits kind : {Logits::kFlat, Logits::kPeaked, Logits::kModel, Logits::kEqual}) {
    std::vector<Request> requests;
    const std::vector<float> logits = MakeLogits(kind, 3000, random);
    for (uint32_t i = 0; i < 700; ++i) {
      Request r;
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
  std::vector<Request> requests;
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    for (const size_t at : {size_t{0}, size_t{99}, size_t{700}, size_t{999}}) {
      for (const bool raw : {false, true}) {
        Request r;
        r.logits = MakeLogits(Logits::kPeaked, 1000, random);
        r.logits[at] = bad;
        r.raw = raw;
        r.banned = {static_cast<int32_t>(at)};  // must not hide it
        r.top_logprobs = static_cast<int32_t>(at % 2);
        requests.push_back(std::move(r));
      }
    }
  }
  const auto add = [&](float value, auto change) {
    Request r;
    r.logits.assign(1000, value);
    change(r);
    requests.push_back(std::move(r));
  };
  add(1e30f, [](Request& r) { r.sampling.temperature = 1e-10f; });
  add(1e30f, [](Request& r) { r.sampling.temperature = 1e-10f, r.sampling.top_k = 3; });
  add(0.0f, [](Request& r) { r.sampling.temperature = 1e-40f; });
  add(-1.0f, [](Request& r) { r.sampling.temperature = 1e-40f; });
  add(1.0f, [](Request& r) {
    for (int32_t id = 0; id < 1000; ++id) r.banned.push_back(id);
  });
  add(1.0f, [](Request& r) { r.biases = {{5, std::numeric_limits<float>::quiet_NaN()}}; });
  add(1.0f, [](Request& r) { r.biases = {{5, std::numeric_limits<float>::infinity()}}; });
  const size_t num_bad = requests.size();
  add(1.0f, [](Request& r) { r.biases = {{5, -std::numeric_limits<float>::infinity()}}; });
  add(-1e30f, [](Request& r) {  // most overflow to -inf: filtered out
    r.sampling.temperature = 1e-10f;
    r.logits[3] = 1.0f;
  });
  ExpectCpuBits(requests);
  const std::vector<Bits> bits = RunGpu(requests);
  for (size_t i = 0; i < requests.size(); ++i) EXPECT_EQ(bits[i][0], i >= num_bad ? 1 : 0) << i;
}

TEST_F(LogProbsTest, EveryTargetOfASmallRow) {
  Random random(8);
  std::vector<Request> requests;
  const std::vector<float> logits = MakeLogits(Logits::kTied, 300, random);
  for (int32_t target = 0; target < 300; ++target) {
    for (const int32_t top_k : {0, 40}) {
      Request r;
      r.logits = logits;
      r.target = target;
      r.sampling.top_k = top_k;
      requests.push_back(std::move(r));
    }
  }
  ExpectCpuBits(requests, 1);
}

TEST_F(LogProbsTest, RejectsWhatItCannotHold) {
  LogProbRow row;
  row.top_logprobs = kMaxTopLogProbs + 1;
  EXPECT_EQ(stage_.Run({&row, 1, 5000}, Stream{}).code(), absl::StatusCode::kInvalidArgument);
  row.top_logprobs = 0;
  EXPECT_EQ(stage_.Run({&row, 1, kMaxDeviceVocab + 1}, Stream{}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(stage_.Run({nullptr, 0, 5000}, Stream{}).ok());
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

  // New contents in the same places.
  void Fill(uint64_t seed) {
    Random random(seed);
    requests_.clear();
    std::vector<float> logits;
    std::vector<DeviceLogProbRow> rows;
    for (int64_t i = 0; i < rows_; ++i) {
      Request r;
      r.logits = MakeLogits(Pick(kKinds, random), kVocab, random);
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
    const std::vector<Bits> expected = RunCpu(requests_);
    const std::vector<DeviceLogProbResult> results = results_.CopyOut();
    const std::vector<int32_t> ids = ids_.CopyOut();
    const std::vector<TokenLogProb> top = top_.CopyOut();
    for (int64_t i = 0; i < rows_; ++i) {
      const auto at = static_cast<size_t>(i);
      const DeviceLogProbResult& result = results[at];
      Bits bits = {static_cast<uint32_t>(result.finite), std::bit_cast<uint32_t>(result.entropy)};
      AppendBits({result.id, result.logprob}, &bits);
      if (i % 5 == 4) {  // padding
        EXPECT_EQ(bits, Bits(4, ~0u)) << i;
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
      AppendBits(kUnset, &bits);
      EXPECT_EQ(bits, expected[at]) << i;
    }
    EXPECT_TRUE(logits_.GuardsIntact() && device_rows_.GuardsIntact() && results_.GuardsIntact() &&
                ids_.GuardsIntact() && top_.GuardsIntact() && workspace_.GuardsIntact());
  }

 private:
  int64_t rows_;
  std::vector<Request> requests_;
  DeviceBuffer<float> logits_;
  DeviceBuffer<DeviceLogProbRow> device_rows_;
  DeviceBuffer<DeviceLogProbResult> results_;
  DeviceBuffer<int32_t> ids_;
  DeviceBuffer<TokenLogProb> top_;
  DeviceBuffer<unsigned char> workspace_;
};

class DeviceLogProbsTest : public testing::Test {
 protected:
  void SetUp() override { ISOBIT_SKIP_WITHOUT_GPU(); }
};

TEST_F(DeviceLogProbsTest, MixedBatchesOfManySizes) {
  for (const int64_t rows : {1, 2, 7, 33, 150}) {
    Batch batch(rows, 20 + static_cast<uint64_t>(rows));
    ASSERT_TRUE(LaunchLogProbs(batch.Args(), Stream{}).ok());
    batch.ExpectCpuBits();
  }
}

TEST_F(DeviceLogProbsTest, WorkspaceServesBatchesOfOtherSizes) {
  Batch large(40, 30);
  Batch small(3, 31);
  for (int round = 0; round < 3; ++round) {
    DeviceLogProbs args = small.Args();
    args.workspace = large.Args().workspace;
    ASSERT_TRUE(LaunchLogProbs(args, Stream{}).ok());
    ASSERT_TRUE(LaunchLogProbs(large.Args(), Stream{}).ok());
  }
  small.ExpectCpuBits();
  large.ExpectCpuBits();
}

TEST_F(DeviceLogProbsTest, RepeatedRunsOnSeveralStreams) {
  constexpr int kStreams = 4;
  std::vector<std::unique_ptr<Batch>> batches;
  cudaStream_t streams[kStreams];
  for (int i = 0; i < kStreams; ++i) {
    batches.push_back(std::make_unique<Batch>(20, 40 + static_cast<uint64_t>(i)));
    ISOBIT_CHECK_CUDA(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
  }
  ISOBIT_CHECK_CUDA(cudaDeviceSynchronize());
  for (int round = 0; round < Scaled(50); ++round) {
    for (int i = 0; i < kStreams; ++i) {
      ASSERT_TRUE(LaunchLogProbs(batches[static_cast<size_t>(i)]->Args(),
                                 Stream{streams[i], round % 2 == 0})
                      .ok());
    }
  }
  for (int i = 0; i < kStreams; ++i) {
    batches[static_cast<size_t>(i)]->ExpectCpuBits();
    ISOBIT_CHECK_CUDA(cudaStreamDestroy(streams[i]));
  }
}

TEST_F(DeviceLogProbsTest, ReplayedGraphReadsWhatTheArraysHoldThen) {
  Batch batch(45, 50);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  ISOBIT_CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  ISOBIT_CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  ASSERT_TRUE(LaunchLogProbs(batch.Args(), Stream{stream}).ok());
  ASSERT_TRUE(LaunchLogProbs(batch.Args(), Stream{stream}).ok());
  ISOBIT_CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  ISOBIT_CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (uint64_t seed = 60; seed < 64; ++seed) {
    batch.Fill(seed);
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
