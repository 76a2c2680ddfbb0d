// The sum over ranks by copy engines against the CPU backend's sum and RMSNorm, bit for bit: all
// ranks on one GPU, and spread over all GPUs; two halves alternately, with delays; ranks that do
// not come.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/rows/rows.h"
#include "kernels/cuda/sm90/collective/copy_engine_sum.h"
#include "tests/kernels/cuda/collective/all_reduce_case.cuh"
#include "tests/kernels/cuda/collective/rank_case.cuh"
#include "tests/kernels/cuda/row_case.h"

namespace isobit::cuda {
namespace {

using testing::HasSubstr;
using testing_support::DeviceBuffer;
using testing_support::Patience;
using testing_support::SameBits;
using testing_support::Scaled;
using testing_support::View;

// A group that sums by copy engines.
class CopyRanks : public RankStreams {
 public:
  CopyRanks(std::vector<int> devices, const CopyEngineSumOptions& options,
            absl::Duration timeout = kRankTimeout)
      : RankStreams(std::move(devices)), barrier_(size()) {
    auto group = PeerGroup::Create(this->devices());
    EXPECT_TRUE(group.ok()) << group.status();
    auto waits = PeerAllReduce::Create(
        *group, {.hidden = options.hidden, .max_rows = 1, .timeout = timeout});
    EXPECT_TRUE(waits.ok()) << waits.status();
    waits_ = *std::move(waits);
    auto memory = group->Allocate(CopyEngineSum::SharedBytes(options, size()), 0);
    EXPECT_TRUE(memory.ok()) << memory.status();
    memory_ = *std::move(memory);
    Each([&](int r) {
      auto sum =
          CopyEngineSum::Create(options, r, size(), memory_, barrier_, *waits_[r], stream(r));
      EXPECT_TRUE(sum.ok()) << sum.status();
      sums_.push_back(*std::move(sum));
    });
  }
  ~CopyRanks() {
    Each([this](int r) { sums_[r] = nullptr; });
  }

  OverlappedSum& sum(int r) { return *sums_[r]; }
  PeerAllReduce& waits(int r) { return *waits_[r]; }
  ThreadBarrier& barrier() { return barrier_; }
  void ExpectOk() const {
    for (const auto& waits : waits_) EXPECT_TRUE(waits->Check().ok()) << waits->Check();
  }

 private:
  ThreadBarrier barrier_;
  std::vector<std::unique_ptr<PeerAllReduce>> waits_;
  PeerMemory memory_;
  std::vector<std::unique_ptr<CopyEngineSum>> sums_;
};

class CopyEngineSumTest : public testing_support::RowTest {
 protected:
  // One sum and norm of a half on all ranks. One rank updates a row's residual; the others leave it
  // as it is.
  void Compare(CopyRanks& ranks, int half, int64_t rows, int64_t hidden) {
    const int64_t count = rows * hidden;
    const bool specials = Chance(3);
    std::vector<std::vector<float>> partials;
    std::vector<const float*> pointers;
    for (int r = 0; r < ranks.size(); ++r) partials.push_back(operands_.Floats(count, specials));
    for (const auto& partial : partials) pointers.push_back(partial.data());
    const std::vector<Bf16> residual = operands_.Bf16s(count, specials);
    const std::vector<float> bias = operands_.Floats(hidden, false);
    const std::vector<Bf16> weight = operands_.Bf16s(hidden, false);
    const bool has_bias = Chance(2);

    std::vector<float> sum(static_cast<size_t>(count));
    ASSERT_TRUE(cpu_->Run(ReduceArgs{.partials = pointers.data(),
                                     .num_ranks = ranks.size(),
                                     .begin = 0,
                                     .end = count,
                                     .count = count,
                                     .out = sum.data()})
                    .ok());
    std::vector<Bf16> expected_residual = residual;
    std::vector<Bf16> expected(residual.size());
    ASSERT_TRUE(cpu_->Run(RmsNormArgs{.residual = expected_residual.data(),
                                      .sum = sum.data(),
                                      .bias = has_bias ? bias.data() : nullptr,
                                      .weight = weight.data(),
                                      .out = expected.data(),
                                      .rows = rows,
                                      .hidden = hidden,
                                      .eps = 1e-6f})
                    .ok());

    struct Buffers {
      DeviceBuffer<float> partial, bias;
      DeviceBuffer<Bf16> residual, weight, out;
    };
    std::vector<std::unique_ptr<Buffers>> buffers;
    const bool dependent = Chance(2);
    ranks.Each([&](int r) {  // alignments differ from rank to rank
      buffers.emplace_back(new Buffers{DeviceBuffer<float>(partials[r], Offset(sizeof(float))),
                                       DeviceBuffer<float>(bias, Offset(sizeof(float))),
                                       DeviceBuffer<Bf16>(residual, Offset(sizeof(Bf16))),
                                       DeviceBuffer<Bf16>(weight, Offset(sizeof(Bf16))),
                                       DeviceBuffer<Bf16>(count)});
    });
    ranks.AtOnce([&](int r) {
      Buffers& b = *buffers[r];
      ranks.stream(r).dependent = dependent;
      ASSERT_TRUE(ranks.sum(r).Send(half, b.partial.data(), rows).ok());
      ASSERT_TRUE(ranks.sum(r)
                      .Sum(half, {.residual = b.residual.data(),
                                  .bias = has_bias ? b.bias.data() : nullptr,
                                  .weight = b.weight.data(),
                                  .rows = rows,
                                  .hidden = hidden,
                                  .eps = 1e-6f})
                      .ok());
      const auto received = ranks.sum(r).Receive(half);
      ASSERT_TRUE(received.ok()) << received.status();
      ISOBIT_CHECK_CUDA(cudaMemcpyAsync(b.out.data(), *received, count * sizeof(Bf16),
                                        cudaMemcpyDefault, ranks.stream(r).handle));
    });
    ranks.Synchronize();
    ranks.ExpectOk();
    std::vector<int> updates(static_cast<size_t>(rows), 0);
    ranks.Each([&](int r) {
      SCOPED_TRACE(absl::StrCat("rank ", r));
      Buffers& b = *buffers[r];
      EXPECT_TRUE(SameBits(View(b.out.CopyOut()), View(expected)));
      const std::vector<Bf16> kept = b.residual.CopyOut();
      for (int64_t row = 0; row < rows; ++row) {
        const auto row_of = [&](const std::vector<Bf16>& all) {
          return std::vector<Bf16>(all.begin() + row * hidden, all.begin() + (row + 1) * hidden);
        };
        if (row_of(kept) == row_of(expected_residual)) {
          ++updates[row];
        } else {
          EXPECT_EQ(row_of(kept), row_of(residual)) << "row " << row;
        }
      }
      EXPECT_TRUE(b.residual.GuardsIntact() && b.out.GuardsIntact());
      buffers[r] = nullptr;
    });
    for (int64_t row = 0; row < rows; ++row) EXPECT_GE(updates[row], 1) << "row " << row;
  }
};

TEST_F(CopyEngineSumTest, EqualsReduceThenRmsNorm) {
  int cases = 0;
  for (const int size : {2, 4, 8}) {
    for (const std::vector<int>& devices : Placements(size)) {
      for (const int64_t hidden : {64, 99, 576, 4096, 9000}) {
        CopyRanks ranks(devices, {.hidden = hidden, .max_rows = 1030});
        for (const int64_t rows : {1, 3, 64, 7, 257, 1030, 2}) {
          if (HasFailure()) return;
          if (rows * hidden * size > Scaled(10'000'000)) continue;
          SCOPED_TRACE(absl::StrCat(rows, " x ", hidden, " on ", absl::StrJoin(devices, ",")));
          Compare(ranks, cases % 2, rows, hidden);
          ++cases;
        }
      }
    }
  }
  std::printf("CopyEngineSum: %d cases\n", cases);
}

// ---- Alternating halves

// Adds every element of residual and out to *digest.
__global__ void __launch_bounds__(256)
    Digest(const Bf16* out, uint32_t n, unsigned long long* digest) {
  ReleaseSuccessor();
  WaitForPredecessor();
  uint64_t sum = 0;
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    sum += DigestOf(i, out[i]);
  }
  if (sum != 0) atomicAdd(digest, sum);
}

constexpr Grid kSmall = {.blocks = dim3(8), .threads = dim3(256)};
constexpr int64_t kHidden = 1536;
constexpr int64_t kRows[] = {100, 3, 256, 1, 700, 17};
constexpr int64_t kMostRows = 700;

int64_t RowsOf(int step) { return kRows[step % std::size(kRows)]; }

// What a rank's steps work on. Each half has its own partials and residual. Steps alternate between
// the halves.
struct StepBuffers {
  explicit StepBuffers(int num_steps)
      : partial{DeviceBuffer<float>(kMostRows * kHidden), DeviceBuffer<float>(kMostRows * kHidden)},
        residual{DeviceBuffer<Bf16>(kMostRows * kHidden), DeviceBuffer<Bf16>(kMostRows * kHidden)},
        weight(std::vector<Bf16>(kHidden, 0x3f9d)),
        digests(std::vector<unsigned long long>(static_cast<size_t>(num_steps), 0)) {
    std::vector<uint32_t> numbers;
    for (int i = 0; i < num_steps; ++i) numbers.push_back(static_cast<uint32_t>(i));
    steps = std::make_unique<DeviceBuffer<uint32_t>>(numbers);
  }

  absl::Status Generate(int step, int rank, int ranks, uint32_t delay, const Stream& stream) {
    return Launch(cuda::Generate, kSmall, stream, partial[step % 2].data(),
                  residual[step % 2].data(), steps->data() + step, rank, ranks,
                  static_cast<uint32_t>(RowsOf(step) * kHidden), delay);
  }
  RmsNormArgs Norm(int step) {
    return {.residual = residual[step % 2].data(),
            .weight = weight.data(),
            .rows = RowsOf(step),
            .hidden = kHidden,
            .eps = 1e-6f};
  }
  absl::Status Digest(int step, const Bf16* out, const Stream& stream) {
    return Launch(isobit::cuda::Digest, kSmall, stream, out,
                  static_cast<uint32_t>(RowsOf(step) * kHidden), digests.data() + step);
  }

  DeviceBuffer<float> partial[2];
  DeviceBuffer<Bf16> residual[2];
  DeviceBuffer<Bf16> weight;
  std::unique_ptr<DeviceBuffer<uint32_t>> steps;
  DeviceBuffer<unsigned long long> digests;
};

// The expected digests, by the kernels that the row tests compare with the CPU's.
std::vector<unsigned long long> ExpectedDigests(int ranks, int num_steps) {
  ISOBIT_CHECK_CUDA(cudaSetDevice(0));
  StepBuffers b(num_steps);
  DeviceBuffer<float> sum(kMostRows * kHidden);
  DeviceBuffer<Bf16> out(kMostRows * kHidden);
  std::vector<std::unique_ptr<StepBuffers>> of_rank;
  for (int r = 0; r < ranks; ++r) of_rank.push_back(std::make_unique<StepBuffers>(num_steps));
  const Stream stream = {.handle = nullptr, .dependent = false};
  for (int step = 0; step < num_steps; ++step) {
    std::vector<const float*> partials;
    for (int r = 0; r < ranks; ++r) {
      EXPECT_TRUE(of_rank[r]->Generate(step, r, ranks, 0, stream).ok());
      partials.push_back(of_rank[r]->partial[step % 2].data());
    }
    const int64_t n = RowsOf(step) * kHidden;
    EXPECT_TRUE(cuda::Run(ReduceArgs{.partials = partials.data(),
                                     .num_ranks = ranks,
                                     .begin = 0,
                                     .end = n,
                                     .count = n,
                                     .out = sum.data()},
                          stream)
                    .ok());
    RmsNormArgs norm = of_rank[0]->Norm(step);
    norm.sum = sum.data();
    norm.out = out.data();
    EXPECT_TRUE(cuda::Run(norm, stream).ok());
    EXPECT_TRUE(b.Digest(step, out.data(), stream).ok());
  }
  return b.digests.CopyOut();
}

// As the model calls it: while one half's sums are copied, the other half's partials are computed.
// Different ranks are late at different steps. No GPU waits for the host.
TEST_F(CopyEngineSumTest, RepeatsWithDelays) {
  const int num_steps = std::max(2, Scaled(60));
  int64_t compared = 0;
  for (const int size : {2, 4, 8}) {
    const std::vector<unsigned long long> expected = ExpectedDigests(size, num_steps);
    for (const std::vector<int>& devices : Placements(size)) {
      for (const bool dependent : {false, true}) {
        SCOPED_TRACE(
            absl::StrCat("devices ", absl::StrJoin(devices, ","), dependent ? ", PDL" : ""));
        CopyRanks ranks(devices, {.hidden = kHidden, .max_rows = kMostRows});
        std::vector<std::unique_ptr<StepBuffers>> buffers;
        ranks.Each([&](int r) {
          buffers.push_back(std::make_unique<StepBuffers>(num_steps));
          ranks.stream(r).dependent = dependent;
        });
        const auto receive = [&](int step, int r) {
          const auto out = ranks.sum(r).Receive(step % 2);
          ASSERT_TRUE(out.ok()) << out.status();
          ASSERT_TRUE(buffers[r]->Digest(step, *out, ranks.stream(r)).ok());
        };
        ranks.AtOnce([&](int r) {
          StepBuffers& b = *buffers[r];
          OverlappedSum& sum = ranks.sum(r);
          for (int step = 0; step < num_steps; ++step) {
            if (step >= 2) receive(step - 2, r);
            const uint32_t delay = step % 3 == 0 ? 50000u : 0u;
            ASSERT_TRUE(b.Generate(step, r, size, delay, ranks.stream(r)).ok());
            if (step >= 1) ASSERT_TRUE(sum.Sum((step - 1) % 2, b.Norm(step - 1)).ok());
            ASSERT_TRUE(sum.Send(step % 2, b.partial[step % 2].data(), RowsOf(step)).ok());
          }
          receive(num_steps - 2, r);
          ASSERT_TRUE(sum.Sum((num_steps - 1) % 2, b.Norm(num_steps - 1)).ok());
          receive(num_steps - 1, r);
        });
        ranks.Synchronize();
        ranks.ExpectOk();
        compared += ExpectDigests(ranks, buffers, expected);
        if (HasFailure()) return;
      }
    }
  }
  std::printf("CopyEngineSum: %lld sums of a rank compared by digest\n",
              static_cast<long long>(compared));
}

// ---- Ranks that do not come

TEST_F(CopyEngineSumTest, GivesUpOnARankThatDoesNotCome) {
  using Clock = std::chrono::steady_clock;
  for (const std::vector<int>& devices : Placements(4)) {
    for (const bool sends : {false, true}) {  // whether the missing rank still sends its partials
      SCOPED_TRACE(absl::StrCat("devices ", absl::StrJoin(devices, ","), ", sends ", sends));
      CopyRanks ranks(devices, {.hidden = kHidden, .max_rows = kMostRows}, absl::Milliseconds(200));
      std::vector<std::unique_ptr<StepBuffers>> buffers;
      ranks.Each([&](int) { buffers.push_back(std::make_unique<StepBuffers>(1)); });
      const auto send = [&](int r) {
        ASSERT_TRUE(ranks.sum(r).Send(0, buffers[r]->partial[0].data(), 100).ok());
      };
      const auto finish = [&](int r) {
        ASSERT_TRUE(ranks.sum(r).Sum(0, buffers[r]->Norm(0)).ok());
        ASSERT_TRUE(ranks.sum(r).Receive(0).ok());
      };
      ranks.AtOnce([&](int r) {
        send(r);
        finish(r);
      });
      ranks.Synchronize();
      ranks.ExpectOk();

      const Clock::time_point begin = Clock::now();
      ranks.AtOnce([&](int r) {
        if (r != 2 || sends) send(r);
        if (r != 2) return finish(r);
        for (int i = 0; i < 2; ++i) {  // the rank's thread comes, its GPU does not
          ASSERT_TRUE(ranks.barrier().Wait(r, kRankTimeout, [] { return absl::OkStatus(); }).ok());
        }
      });
      ranks.Synchronize();
      const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
      EXPECT_GE(seconds, 0.19);
      EXPECT_LT(seconds, 0.9 * Patience());
      for (int r = 0; r < 4; ++r) {
        const absl::Status status = ranks.waits(r).Check();
        EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
        EXPECT_THAT(status.message(), HasSubstr("not begun by rank 2"));
      }
    }
  }
}

TEST_F(CopyEngineSumTest, GivesUpOnAThreadThatDoesNotCome) {
  CopyRanks ranks({0, 0},
                  {.hidden = kHidden, .max_rows = kMostRows, .timeout = absl::Milliseconds(50)});
  StepBuffers b(1);
  ASSERT_TRUE(ranks.sum(0).Send(0, b.partial[0].data(), 100).ok());
  EXPECT_EQ(ranks.sum(0).Sum(0, b.Norm(0)),
            absl::DeadlineExceededError("rank 0 waited 50ms for rank 1"));
  ranks.Synchronize();
}

TEST_F(CopyEngineSumTest, RefusesWhatItCannotDo) {
  CopyRanks ranks({0, 0}, {.hidden = 64, .max_rows = 10});
  EXPECT_EQ(ranks.sum(0).Send(0, nullptr, 11).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ranks.sum(0).Sum(0, {.rows = 5, .hidden = 128}).code(),
            absl::StatusCode::kInvalidArgument);
  const auto group = PeerGroup::Create({0, 0});
  const auto memory = group->Allocate(1 << 20, 0);
  ThreadBarrier barrier(2);
  EXPECT_EQ(CopyEngineSum::Create({.hidden = 64, .max_rows = 0}, 0, 2, *memory, barrier,
                                  ranks.waits(0), ranks.stream(0))
                .status()
                .code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace isobit::cuda
