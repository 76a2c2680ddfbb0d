// The all-reduce over peer memory against the CPU backend's sum and RMSNorm, bit for bit: all ranks
// on one GPU, and spread over all GPUs; replays of graphs with delays; ranks that do not come.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/device/partial_push.cuh"
#include "kernels/cuda/common/device/system_memory.cuh"
#include "kernels/cuda/common/rows/rows.h"
#include "kernels/cuda/sm90/collective/all_reduce.h"
#include "kernels/cuda/sm90/collective/hop_all_reduce.h"
#include "kernels/cuda/sm90/collective/row_quads.cuh"
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

// What a linear layer's epilogue does with its sums.
__global__ void __launch_bounds__(256)
    PushRows(const __grid_constant__ PartialPush push, const float* partial, int rows, int hidden) {
  WaitForPredecessor();
  ReleaseSuccessor();
  const uint32_t operation = NextOperation(push);
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < rows * push.quads;
       i += static_cast<int>(gridDim.x * blockDim.x)) {
    const int row = i / push.quads;
    const int quad = i % push.quads;
    float sums[kQuad] = {};
    for (int c = 0; c < kQuad && kQuad * quad + c < hidden; ++c) {
      sums[c] = partial[int64_t{row} * hidden + kQuad * quad + c];
    }
    PushQuad(push, operation, row, quad, {sums[0], sums[1], sums[2], sums[3]});
  }
}

// The sum and norm of partials that lie in memory or, with `pushes`, have been pushed.
absl::Status NormOf(PeerAllReduce& end, const float* partial, bool pushes, const RmsNormArgs& norm,
                    const Stream& stream) {
  const PartialPush* const push = pushes ? end.Push(norm.rows) : nullptr;
  if (push == nullptr) return end.Norm(partial, norm, stream);
  const absl::Status pushed =
      Launch(PushRows, {.blocks = dim3(8), .threads = dim3(256)}, stream, *push, partial,
             static_cast<int>(norm.rows), static_cast<int>(norm.hidden));
  return pushed.ok() ? end.Norm(nullptr, norm, stream) : pushed;
}

class AllReduceTest : public testing_support::RowTest {
 protected:
  AllReduceTest() : hopping_(MakeCpuBackend({.mode = NumericsMode::kBatchInvariant})) {}

  // The ranks' partials. Often half of the columns cancel between the halves of the ranks.
  std::vector<std::vector<float>> Partials(int ranks, int64_t count, bool specials) {
    std::vector<std::vector<float>> partials;
    const bool cancel = Chance(2);
    for (int r = 0; r < ranks; ++r) {
      partials.push_back(operands_.Floats(count, specials));
      if (cancel && r >= ranks / 2) {
        const std::vector<float>& other = partials[r - ranks / 2];
        for (int64_t i = Below(2); i < count; i += 2) {
          partials[r][i] =
              contract::FromBits(contract::BitsOf(-other[i]) ^ (i % 32 == 0 ? 1u : 0u));
        }
      }
      // What an empty word of a mailbox holds.
      if (specials) partials[r][Below(count)] = contract::FromBits(0xffffffffu);
    }
    return partials;
  }

  // One sum and norm on all ranks. Counts the elements that addition in rank order would have made
  // different. hops: the ranks add in rank order.
  void Compare(Ranks& ranks, int64_t rows, int64_t hidden, bool hops, int64_t* hop_differs) {
    const int64_t count = rows * hidden;
    const bool specials = Chance(3);
    const auto partials = Partials(ranks.size(), count, specials);
    const std::vector<Bf16> residual = operands_.Bf16s(count, specials);
    const std::vector<float> bias = operands_.Floats(hidden, false);
    const std::vector<Bf16> weight = operands_.Bf16s(hidden, false);
    const bool has_bias = Chance(2);

    std::vector<const float*> pointers;
    for (const auto& partial : partials) pointers.push_back(partial.data());
    std::vector<Bf16> expected_residual = residual;
    std::vector<Bf16> expected(residual.size());
    const auto reference = [&](Backend& order, std::vector<Bf16>& h, std::vector<Bf16>& out) {
      std::vector<float> sum(static_cast<size_t>(count));
      ASSERT_TRUE(order
                      .Run(ReduceArgs{.partials = pointers.data(),
                                      .num_ranks = ranks.size(),
                                      .begin = 0,
                                      .end = count,
                                      .count = count,
                                      .out = sum.data()})
                      .ok());
      ASSERT_TRUE(cpu_->Run(RmsNormArgs{.residual = h.data(),
                                        .sum = sum.data(),
                                        .bias = has_bias ? bias.data() : nullptr,
                                        .weight = weight.data(),
                                        .out = out.data(),
                                        .rows = rows,
                                        .hidden = hidden,
                                        .eps = 1e-6f})
                      .ok());
    };
    reference(hops ? *hopping_ : *cpu_, expected_residual, expected);
    std::vector<Bf16> other_residual = residual;
    std::vector<Bf16> other(residual.size());
    reference(hops ? *cpu_ : *hopping_, other_residual, other);
    for (size_t i = 0; i < other.size(); ++i) *hop_differs += other[i] != expected[i] ? 1 : 0;

    struct Buffers {
      DeviceBuffer<float> partial, bias;
      DeviceBuffer<Bf16> residual, weight, out;
    };
    std::vector<std::unique_ptr<Buffers>> buffers;
    const bool dependent = Chance(2);
    const bool pushes = Chance(2);
    ranks.Each([&](int r) {  // alignments differ from rank to rank
      buffers.emplace_back(new Buffers{DeviceBuffer<float>(partials[r], Offset(sizeof(float))),
                                       DeviceBuffer<float>(bias, Offset(sizeof(float))),
                                       DeviceBuffer<Bf16>(residual, Offset(sizeof(Bf16))),
                                       DeviceBuffer<Bf16>(weight, Offset(sizeof(Bf16))),
                                       DeviceBuffer<Bf16>(count, Offset(sizeof(Bf16)))});
    });
    ranks.Each([&](int r) {
      Buffers& b = *buffers[r];
      const absl::Status status = NormOf(ranks.end(r), b.partial.data(), pushes,
                                         {.residual = b.residual.data(),
                                          .bias = has_bias ? b.bias.data() : nullptr,
                                          .weight = b.weight.data(),
                                          .out = b.out.data(),
                                          .rows = rows,
                                          .hidden = hidden,
                                          .eps = 1e-6f},
                                         {ranks.stream(r).handle, dependent});
      ASSERT_TRUE(status.ok()) << status;
    });
    ranks.Synchronize();
    ranks.ExpectOk();
    ranks.Each([&](int r) {
      SCOPED_TRACE(absl::StrCat("rank ", r));
      Buffers& b = *buffers[r];
      EXPECT_TRUE(SameBits(View(b.residual.CopyOut()), View(expected_residual)));
      EXPECT_TRUE(SameBits(View(b.out.CopyOut()), View(expected)));
      EXPECT_TRUE(b.residual.GuardsIntact() && b.out.GuardsIntact());
      buffers[r] = nullptr;
    });
  }

  const std::unique_ptr<Backend> hopping_;
};

TEST_F(AllReduceTest, EqualsReduceThenRmsNorm) {
  int cases = 0;
  int64_t elements = 0;
  int64_t differs = 0;
  for (const int size : {2, 4, 8}) {
    for (const std::vector<int>& devices : Placements(size)) {
      for (const int64_t hidden : {64, 99, 100, 576, 1024, 2048, 4096, 5120, 16384}) {
        const int64_t max_rows = hidden == 64 || hidden == 1024 ? 4096 : 600;
        Ranks ranks(devices, {.hidden = hidden,
                              .max_rows = max_rows,
                              .push = {.rows = 600},
                              .timeout = kRankTimeout});
        for (const int64_t rows :
             {1, 3, 16, 1, 63, 64, 65, 96, 100, 127, 128, 256, 511, 512, 513, 2, 1024, 4099, 33}) {
          if (HasFailure()) return;
          if (rows * hidden * size > Scaled(40'000'000)) continue;
          SCOPED_TRACE(absl::StrCat(rows, " x ", hidden, " on ", absl::StrJoin(devices, ",")));
          Compare(ranks, rows, hidden, /*hops=*/false, &differs);
          ++cases;
          elements += rows * hidden;
        }
      }
    }
  }
  // Control: the order of the sum shows in the bits.
  EXPECT_GT(100 * differs, elements);
  std::printf("Norm: %d cases, %lld elements a rank; rank order changes %.1f %% of them\n", cases,
              static_cast<long long>(elements),
              100.0 * static_cast<double>(differs) / static_cast<double>(elements));
}

TEST_F(AllReduceTest, ModeBatchInvariantAddsInRankOrder) {
  int64_t differs = 0;
  for (const int size : {2, 4, 8}) {
    Ranks ranks(Placements(size).back(), {.hidden = 1024, .kernels = HopAllReduceKernel});
    for (const int64_t rows : {1, 3, 64, 300}) {
      Compare(ranks, rows, 1024, /*hops=*/true, &differs);
    }
  }
  EXPECT_GT(differs, 0);
}

// ---- Replays

// Adds every element of residual and out to the digest of step *step, and poisons them.
__global__ void __launch_bounds__(256) Digest(Bf16* residual, Bf16* out, const uint32_t* step,
                                              uint32_t n, unsigned long long* digests) {
  WaitForPredecessor();
  uint64_t sum = 0;
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    sum += DigestOf(2 * i, residual[i]) + DigestOf(2 * i + 1, out[i]);
    residual[i] = out[i] = 0xdead;
  }
  if (sum != 0) atomicAdd(digests + *step, sum);
}

__global__ void NextStep(uint32_t* step) {
  WaitForPredecessor();
  ++*step;
}

constexpr Grid kSmall = {.blocks = dim3(8), .threads = dim3(256)};
constexpr Grid kOne = {.blocks = dim3(1), .threads = dim3(1)};

// What a rank's steps work on.
struct StepBuffers {
  StepBuffers(int64_t count, int64_t hidden, int64_t steps)
      : partial(count),
        residual(count),
        out(count),
        weight(std::vector<Bf16>(static_cast<size_t>(hidden), 0x3f9d)),
        step(std::vector<uint32_t>{0}),
        digests(std::vector<unsigned long long>(static_cast<size_t>(steps), 0)) {}

  RmsNormArgs Norm(int64_t rows, int64_t hidden) {
    return {.residual = residual.data(),
            .weight = weight.data(),
            .out = out.data(),
            .rows = rows,
            .hidden = hidden,
            .eps = 1e-6f};
  }
  absl::Status Finish(uint32_t n, const Stream& stream) {
    if (absl::Status s = Launch(Digest, kSmall, stream, residual.data(), out.data(), step.data(), n,
                                digests.data());
        !s.ok()) {
      return s;
    }
    return Launch(NextStep, kOne, stream, step.data());
  }

  DeviceBuffer<float> partial;
  DeviceBuffer<Bf16> residual, out, weight;
  DeviceBuffer<uint32_t> step;
  DeviceBuffer<unsigned long long> digests;
};

class Graph {
 public:
  Graph(cudaStream_t stream, const std::function<void()>& work) {
    ISOBIT_CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    work();
    cudaGraph_t graph = nullptr;
    ISOBIT_CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    ISOBIT_CHECK_CUDA(cudaGraphInstantiate(&executable_, graph, 0));
    ISOBIT_CHECK_CUDA(cudaGraphDestroy(graph));
    ISOBIT_CHECK_CUDA(cudaGraphUpload(executable_, stream));
    ISOBIT_CHECK_CUDA(cudaStreamSynchronize(stream));
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() { cudaGraphExecDestroy(executable_); }
  void Replay(cudaStream_t stream) { ISOBIT_CHECK_CUDA(cudaGraphLaunch(executable_, stream)); }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

// The expected digests of steps 0, 1, ..., by the kernels that the row tests compare with the
// CPU's.
std::vector<unsigned long long> ExpectedDigests(int ranks, const std::vector<int64_t>& rows,
                                                int64_t hidden, int replays) {
  const int64_t most = *std::ranges::max_element(rows) * hidden;
  const int64_t steps = replays * static_cast<int64_t>(rows.size());
  ISOBIT_CHECK_CUDA(cudaSetDevice(0));
  StepBuffers b(most, hidden, steps);
  DeviceBuffer<float> sum(most);
  std::vector<std::unique_ptr<DeviceBuffer<float>>> partials;
  std::vector<const float*> pointers;
  for (int r = 0; r < ranks; ++r) {
    partials.push_back(std::make_unique<DeviceBuffer<float>>(most));
    pointers.push_back(partials.back()->data());
  }
  const Stream stream = {.handle = nullptr, .dependent = false};
  for (int64_t i = 0; i < steps; ++i) {
    const int64_t rows_now = rows[i % rows.size()];
    const int64_t n = rows_now * hidden;
    for (int r = 0; r < ranks; ++r) {
      EXPECT_TRUE(Launch(Generate, {.blocks = dim3(256), .threads = dim3(256)}, stream,
                         partials[r]->data(), b.residual.data(), b.step.data(), r, ranks, n, 0u)
                      .ok());
    }
    EXPECT_TRUE(cuda::Run(ReduceArgs{.partials = pointers.data(),
                                     .num_ranks = ranks,
                                     .begin = 0,
                                     .end = n,
                                     .count = n,
                                     .out = sum.data()},
                          stream)
                    .ok());
    RmsNormArgs norm = b.Norm(rows_now, hidden);
    norm.sum = sum.data();
    EXPECT_TRUE(cuda::Run(norm, stream).ok());
    EXPECT_TRUE(b.Finish(static_cast<uint32_t>(n), stream).ok());
  }
  return b.digests.CopyOut();
}

// Sizes and schedules change from step to step. Steps and replays follow each other without the
// host. Different ranks are late at different steps. The kernel before an all-reduce lets it start
// at once.
TEST_F(AllReduceTest, ReplaysWithDelays) {
  constexpr int64_t kHidden = 1536;
  const std::vector<int64_t> rows = {100, 3, 256, 1, 64, 17, 300, 16, 2100, 2, 40, 512, 96, 127};
  const int64_t most = std::ranges::max(rows) * kHidden;
  const int replays = Scaled(60);
  const int64_t steps = replays * static_cast<int64_t>(rows.size());
  int64_t compared = 0;
  for (const int size : {2, 4, 8}) {
    const std::vector<unsigned long long> expected = ExpectedDigests(size, rows, kHidden, replays);
    for (const std::vector<int>& devices : Placements(size)) {
      for (const bool dependent : {false, true}) {
        SCOPED_TRACE(
            absl::StrCat("devices ", absl::StrJoin(devices, ","), dependent ? ", PDL" : ""));
        Ranks ranks(
            devices,
            {.hidden = kHidden, .max_rows = 2090, .push = {.rows = 512}, .timeout = kRankTimeout});
        std::vector<std::unique_ptr<StepBuffers>> buffers;
        std::vector<std::unique_ptr<Graph>> graphs;
        ranks.Each([&](int r) {
          buffers.push_back(std::make_unique<StepBuffers>(most, kHidden, steps));
          StepBuffers& b = *buffers.back();
          const Stream stream = {ranks.stream(r).handle, dependent};
          graphs.push_back(std::make_unique<Graph>(stream.handle, [&] {
            for (size_t i = 0; i < rows.size(); ++i) {
              const auto n = static_cast<uint32_t>(rows[i] * kHidden);
              ASSERT_TRUE(Launch(Generate, kSmall, stream, b.partial.data(), b.residual.data(),
                                 b.step.data(), r, size, n, i % 2 == 0 ? 20000u : 0u)
                              .ok());
              ASSERT_TRUE(NormOf(ranks.end(r), b.partial.data(), i % 3 != 0,
                                 b.Norm(rows[i], kHidden), stream)
                              .ok());
              ASSERT_TRUE(b.Finish(n, stream).ok());
            }
          }));
        });
        for (int i = 0; i < replays; ++i) {
          ranks.Each([&](int r) { graphs[r]->Replay(ranks.stream(r).handle); });
        }
        ranks.Synchronize();
        ranks.ExpectOk();
        compared += ExpectDigests(ranks, buffers, expected);
        if (HasFailure()) return;
      }
    }
  }
  std::printf("Replays: %lld outputs of a rank compared by digest\n",
              static_cast<long long>(compared));
}

// ---- Barrier

__global__ void Write(uint32_t* words, const uint32_t* step, int rank) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const uint64_t begin = GlobalTimer();
  while (GlobalTimer() - begin < Mix(*step * 8 + static_cast<uint32_t>(rank)) % 20000) {
  }
  words[threadIdx.x] = *step * 1000 + threadIdx.x;
}

struct PeerWords {
  const uint32_t* of_rank[8];
};

__global__ void CountStale(PeerWords words, int ranks, uint32_t* step, unsigned* stale) {
  WaitForPredecessor();
  for (int r = 0; r < ranks; ++r) {
    if (words.of_rank[r][threadIdx.x] != *step * 1000 + threadIdx.x) atomicAdd(stale, 1u);
  }
}

TEST_F(AllReduceTest, BarrierShowsWhatPeersWrote) {
  constexpr int kWords = 256;
  const int replays = Scaled(300);
  for (const int size : {2, 4, 8}) {
    for (const std::vector<int>& devices : Placements(size)) {
      SCOPED_TRACE(absl::StrCat("devices ", absl::StrJoin(devices, ",")));
      Ranks ranks(devices, {.hidden = 64, .timeout = kRankTimeout});
      const auto group = PeerGroup::Create(devices);
      ASSERT_TRUE(group.ok());
      const auto memory = group->Allocate(kWords * sizeof(uint32_t), 0xff);
      ASSERT_TRUE(memory.ok());
      PeerWords words = {};
      for (int r = 0; r < size; ++r) {
        words.of_rank[r] = reinterpret_cast<const uint32_t*>(memory->of_rank(r));
      }
      std::vector<std::unique_ptr<DeviceBuffer<uint32_t>>> counters;
      std::vector<std::unique_ptr<Graph>> graphs;
      ranks.Each([&](int r) {
        counters.push_back(std::make_unique<DeviceBuffer<uint32_t>>(std::vector<uint32_t>{1, 0}));
        uint32_t* const step = counters.back()->data();
        const Stream stream = ranks.stream(r);
        const Grid grid = {.blocks = dim3(1), .threads = dim3(kWords)};
        graphs.push_back(std::make_unique<Graph>(stream.handle, [&] {
          ASSERT_TRUE(
              Launch(Write, grid, stream, const_cast<uint32_t*>(words.of_rank[r]), step, r).ok());
          ASSERT_TRUE(ranks.end(r).Barrier(stream).ok());
          ASSERT_TRUE(Launch(CountStale, grid, stream, words, size, step, step + 1).ok());
          ASSERT_TRUE(Launch(NextStep, kOne, stream, step).ok());
          ASSERT_TRUE(ranks.end(r).Barrier(stream).ok());
        }));
      });
      for (int i = 0; i < replays; ++i) {
        ranks.Each([&](int r) { graphs[r]->Replay(ranks.stream(r).handle); });
      }
      ranks.Synchronize();
      ranks.ExpectOk();
      ranks.Each([&](int r) {
        const std::vector<uint32_t> counts = counters[r]->CopyOut();
        EXPECT_EQ(counts[0], 1u + static_cast<uint32_t>(replays));
        EXPECT_EQ(counts[1], 0u) << "stale words on rank " << r;
      });
    }
  }
}

// ---- Ranks that do not come

TEST_F(AllReduceTest, GivesUpOnARankThatDoesNotCome) {
  constexpr int64_t kHidden = 1024;
  using Clock = std::chrono::steady_clock;
  const auto seconds_since = [](Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  for (const std::vector<int>& devices : Placements(4)) {
    // A barrier, one shot, two shots; two shots of pushed partials.
    for (const int64_t rows : {0, 1, 200, -200}) {
      const bool pushes = rows < 0;
      SCOPED_TRACE(absl::StrCat(rows, " rows, devices ", absl::StrJoin(devices, ",")));
      Ranks ranks(devices,
                  {.hidden = kHidden, .push = {.rows = 200}, .timeout = absl::Milliseconds(200)});
      std::vector<std::unique_ptr<StepBuffers>> buffers;
      ranks.Each([&](int) {
        buffers.push_back(std::make_unique<StepBuffers>(200 * kHidden, kHidden, 1));
      });
      const auto launch = [&](int r) {
        const Stream stream = ranks.stream(r);
        StepBuffers& b = *buffers[r];
        return rows == 0 ? ranks.end(r).Barrier(stream)
                         : NormOf(ranks.end(r), b.partial.data(), pushes,
                                  b.Norm(std::abs(rows), kHidden), stream);
      };
      const auto all_but_third = [&](int r) {
        if (r != 2) ASSERT_TRUE(launch(r).ok());
      };
      ranks.Each([&](int r) { ASSERT_TRUE(launch(r).ok()); });
      ranks.Synchronize();
      ranks.ExpectOk();

      Clock::time_point begin = Clock::now();
      ranks.Each(all_but_third);
      ranks.ExpectOk();
      ranks.Synchronize();
      EXPECT_GE(seconds_since(begin), 0.19);
      EXPECT_LT(seconds_since(begin), 1.0 * Patience());
      for (int r = 0; r < 4; ++r) {
        const absl::Status status = ranks.end(r).Check();
        EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
        EXPECT_THAT(status.message(), HasSubstr("waited 200ms"));
        EXPECT_THAT(status.message(), HasSubstr("not begun by rank 2"));
      }
      // From here on no rank waits, whichever ranks come.
      begin = Clock::now();
      for (int i = 0; i < 50; ++i) ranks.Each(all_but_third);
      for (int i = 0; i < 50; ++i) ASSERT_TRUE(launch(2).ok());
      ranks.Synchronize();
      EXPECT_LT(seconds_since(begin), 0.15 * Patience());
    }
  }
}

TEST_F(AllReduceTest, OneRankHasNothingToWaitFor) {
  int64_t differs = 0;
  Ranks ranks({0}, {.hidden = 576});
  Compare(ranks, 7, 576, /*hops=*/false, &differs);
  EXPECT_TRUE(ranks.end(0).Barrier({ranks.stream(0)}).ok());
}

TEST_F(AllReduceTest, RefusesWhatItCannotDo) {
  const auto refusal = [](const AllReduceOptions& options) {
    return PeerAllReduce::Create(*PeerGroup::Create({0, 0}), options).status().code();
  };
  EXPECT_EQ(refusal({.hidden = 0}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refusal({.hidden = 16385}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refusal({.hidden = 64, .max_rows = 0}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refusal({.hidden = 64, .max_rows = 32769}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refusal({.hidden = 64, .timeout = absl::ZeroDuration()}),
            absl::StatusCode::kInvalidArgument);
  Ranks ranks({0, 0}, {.hidden = 64});
  EXPECT_EQ(ranks.end(0).Norm(nullptr, {.rows = 1, .hidden = 128}, {ranks.stream(0)}).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(PeerGroupTest, RefusesWhatIsNoGroup) {
  EXPECT_EQ(PeerGroup::Create({0, 0, 0}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(PeerGroup::Create({0, 1000}).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(AllReduceTest, PeerMemoryIsFilledOnEveryDevice) {
  for (const std::vector<int>& devices : Placements(8)) {
    const auto group = PeerGroup::Create(devices);
    ASSERT_TRUE(group.ok());
    const auto memory = group->Allocate(1000, 0x5a);
    ASSERT_TRUE(memory.ok());
    for (int r = 0; r < 8; ++r) {
      std::vector<unsigned char> bytes(1000);
      ISOBIT_CHECK_CUDA(cudaMemcpy(bytes.data(), memory->of_rank(r), 1000, cudaMemcpyDefault));
      EXPECT_TRUE(std::ranges::all_of(bytes, [](unsigned char b) { return b == 0x5a; }));
    }
  }
}

}  // namespace
}  // namespace isobit::cuda
