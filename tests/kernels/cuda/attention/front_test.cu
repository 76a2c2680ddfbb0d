// Attention as the model calls it, which mixes schedules, against the CPU backend, bit for bit:
// mixed batches, streams, replayed graphs, and what it may read before its predecessor has ended.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/cuda/attention/batch.h"
#include "tests/kernels/cuda/attention/write_late.cuh"

namespace isobit::cuda {
namespace {

using AttentionFrontTest = testing_support::GpuTest;

// Decode, prefill and padding in one call.
TEST_F(AttentionFrontTest, RandomMixedBatches) {
  Random random(3);
  const int cases = testing_support::Scaled(600);
  for (int i = 0; i < cases; ++i) {
    Shape shape = RandomShape(random);
    if (i % 2 == 0) shape.head_dim = OneOf(random, {64, 96, 128, 256});
    std::vector<Rows> sequences = RandomRows(random, 3, 900);
    for (Rows& s : sequences) {
      if (Below(random, 3) != 0) continue;
      s = {Below(random, i % 20 == 0 ? 300 : 90), Below(random, 3) * Below(random, 400)};
    }
    sequences.push_back({1, Below(random, 600)});
    Batch batch(shape, sequences, random());
    DeviceBatch device(batch);
    ASSERT_TRUE(SameBits<Bf16>(device.Front(), batch.Expected()))
        << "case " << i << ": " << shape.Describe();
  }
  std::printf("%d mixed batches\n", cases);
}

// A few rows over a long context take the decode schedule in several blocks; more rows take
// prefill.
TEST_F(AttentionFrontTest, FewRowsOverLongContexts) {
  Random random(12);
  const int cases = testing_support::Scaled(30);
  for (int i = 0; i < cases; ++i) {
    Shape shape = RandomShape(random);
    shape.page_size = std::max(shape.page_size, 7);
    Batch batch(shape, {{1 + Below(random, 40), 4200 + Below(random, 800)}, {1, 700}, {0, 9}},
                random());
    DeviceBatch device(batch);
    ASSERT_TRUE(SameBits<Bf16>(device.Front(), batch.Expected())) << i << ": " << shape.Describe();
  }
}

TEST_F(AttentionFrontTest, RepeatedOnTwoStreams) {
  Random random(9);
  Batch batch({.heads = 16, .kv_heads = 2, .head_dim = 128, .page_size = 32},
              RandomRows(random, 2, 3000), 9);
  const std::vector<Bf16> expected = batch.Expected();
  DeviceBatch first(batch);
  DeviceBatch second(batch);
  const size_t bytes = AttentionWorkspaceBytes(first.Args());
  DeviceBuffer<std::byte> first_workspace(static_cast<int64_t>(bytes));
  DeviceBuffer<std::byte> second_workspace(static_cast<int64_t>(bytes));
  cudaStream_t streams[2];
  for (cudaStream_t& s : streams) {
    ISOBIT_CHECK_CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  }
  for (int round = 0; round < 40; ++round) {
    first.out().Poison();
    second.out().Poison();
    for (int launch = 0; launch < 3;
         ++launch) {  // back to back: one may start before the one before it ends
      ASSERT_TRUE(
          LaunchAttention(first.Args(), {first_workspace.data(), bytes}, OnH200(streams[0])).ok());
      ASSERT_TRUE(
          LaunchAttention(second.Args(), {second_workspace.data(), bytes}, OnH200(streams[1]))
              .ok());
    }
    ASSERT_TRUE(SameBits<Bf16>(first.out().CopyOut(), expected)) << round;
    ASSERT_TRUE(SameBits<Bf16>(second.out().CopyOut(), expected)) << round;
  }
  for (const cudaStream_t s : streams) ISOBIT_CHECK_CUDA(cudaStreamDestroy(s));
}

// Attention may read the keys of earlier steps before its predecessor has ended, but nothing that
// this step writes: neither the sequences' own rows nor what the other half of the step wrote.
TEST_F(AttentionFrontTest, WaitsForThisStepsRows) {
  Random random(13);
  const int cases = testing_support::Scaled(60);
  for (int i = 0; i < cases; ++i) {
    Shape shape = RandomShape(random);
    if (i % 2 == 0) shape.head_dim = OneOf(random, {64, 128, 256});
    std::vector<Rows> sequences(static_cast<size_t>(OneOf(random, {1, 2, 40})));
    for (Rows& s : sequences) s = {1 + Below(random, 2), LogUniform(random, 2000) - 1};
    Batch batch(shape, sequences, random());
    const std::vector<Bf16> expected = batch.Expected();
    DeviceBuffer<Bf16> k(batch.k());
    DeviceBuffer<Bf16> v(batch.v());
    DeviceBuffer<Bf16> q(batch.q());
    const bool writes_past = i % 3 == 0;
    for (size_t s = 0; s < sequences.size(); ++s) {
      const int64_t end = sequences[s].first_position + sequences[s].rows;
      for (int64_t position = writes_past ? 0 : sequences[s].first_position; position < end;
           ++position) {
        const int64_t page = batch.tables()[s][static_cast<size_t>(position / shape.page_size)];
        for (int64_t h = 0; h < shape.kv_heads; ++h) {
          const int64_t slot =
              (page * shape.kv_heads + h) * shape.page_size + position % shape.page_size;
          std::fill_n(batch.k().data() + slot * shape.head_dim, shape.head_dim, kPoison);
          std::fill_n(batch.v().data() + slot * shape.head_dim, shape.head_dim, kPoison);
        }
      }
    }
    std::ranges::fill(batch.q(), kPoison);
    const auto expect = [&](const char* name, const DeviceBatch::Launcher& launch) {
      DeviceBatch device(batch, {.writes_past = writes_past});
      const std::vector<Bf16> actual = device.Run(
          [&](const AttentionArgs& args, const AttentionWorkspace& workspace, const Stream& s) {
            const absl::Status late = LaunchWriteLate(device, k, v, q, s);
            return late.ok() ? launch(args, workspace, s) : late;
          },
          std::max(AttentionWorkspaceBytes(device.Args()),
                   DecodeWorkspaceBytes(device.Args(), device.sequences(), 2)));
      EXPECT_TRUE(SameBits<Bf16>(actual, expected))
          << i << ", " << name << ": " << shape.Describe();
    };
    expect("as the model calls it", LaunchAttention);
    for (const DecodeSchedule& schedule : DecodeSchedules(shape)) {
      expect(schedule.kind == DecodeSchedule::kTeams ? "by pairs" : "by clusters",
             [&](const AttentionArgs& args, const AttentionWorkspace& workspace, const Stream& s) {
               return LaunchDecodeAttentionAs(schedule, args, *args.sequences.device, 2, workspace,
                                              s);
             });
    }
    if (HasFailure()) return;
  }
}

// Captures one call for the bounds, with the memory that `largest` needs, and replays it with the
// tables of other steps.
void ExpectReplays(const Shape& shape, const StepBounds& bounds, const std::vector<Rows>& largest,
                   Random& random, const std::function<std::vector<Rows>()>& other_step) {
  Batch first(shape, largest, 1);
  DeviceBatch device(first, bounds);
  ASSERT_TRUE(device.upload()
                  .Reserve(bounds.num_rows, bounds.num_sequences, bounds.num_sequences * 4096 / 16)
                  .ok());
  device.Upload(bounds);
  const size_t bytes = AttentionWorkspaceBytes(device.Args());
  DeviceBuffer<std::byte> workspace(static_cast<int64_t>(bytes));

  cudaStream_t stream;
  ISOBIT_CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  ISOBIT_CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  ASSERT_TRUE(LaunchAttention(device.Args(), {workspace.data(), bytes}, OnH200(stream)).ok());
  ISOBIT_CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  ISOBIT_CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  const int64_t generation = device.upload().generation();
  for (int i = 0; i < 30; ++i) {
    Batch batch(shape, other_step(), random());
    device.k().CopyIn(batch.k());
    device.v().CopyIn(batch.v());
    device.q().CopyIn(batch.q());
    device.out().Poison();
    const std::vector<int32_t> ids(static_cast<size_t>(batch.rows()), 1);
    ASSERT_TRUE(device.upload().Upload(ids, batch.host(), shape.page_size, bounds, stream).ok());
    ISOBIT_CHECK_CUDA(cudaGraphLaunch(exec, stream));
    std::vector<Bf16> actual = device.out().CopyOut();
    actual.resize(static_cast<size_t>(batch.rows() * batch.ldo()));
    ASSERT_TRUE(SameBits<Bf16>(actual, batch.Expected())) << i;
    EXPECT_TRUE(workspace.GuardsIntact());
  }
  EXPECT_EQ(device.upload().generation(), generation);
  ISOBIT_CHECK_CUDA(cudaGraphExecDestroy(exec));
  ISOBIT_CHECK_CUDA(cudaGraphDestroy(graph));
  ISOBIT_CHECK_CUDA(cudaStreamDestroy(stream));
}

// One captured call serves steps of other lengths, other numbers of sequences and other pages, up
// to its bounds.
TEST_F(AttentionFrontTest, GraphReplaysWithOtherTables) {
  Random random(10);
  const Shape shape = {.heads = 8, .kv_heads = 2, .head_dim = 64, .page_size = 16};
  ExpectReplays(shape, {.num_rows = 8, .num_sequences = 8, .max_rows = 1, .max_positions = 4096},
                std::vector<Rows>(8, {1, 3000}), random, [&random] {
                  std::vector<Rows> sequences(static_cast<size_t>(1 + Below(random, 8)));
                  for (Rows& s : sequences) {
                    s = {Below(random, 5) == 0 ? 0 : 1, LogUniform(random, 3000) - 1};
                  }
                  return sequences;
                });
}

// So it does where some sequences have guesses: by one schedule (2 KV heads), or sequences
// of 9 rows by another (32).
TEST_F(AttentionFrontTest, GraphReplaysWithGuesses) {
  Random random(11);
  constexpr int32_t kRows = 64;
  for (const int32_t kv_heads : {2, 32}) {
    const Shape shape = {
        .heads = 4 * kv_heads, .kv_heads = kv_heads, .head_dim = 64, .page_size = 16};
    ExpectReplays(shape,
                  {.num_rows = kRows, .num_sequences = kRows, .max_rows = 9, .max_positions = 4096},
                  std::vector<Rows>(kRows, {1, 1600}), random, [&random] {
                    std::vector<Rows> sequences;
                    for (int64_t left = kRows - Below(random, kRows); left > 0;) {
                      const int64_t rows = Below(random, 2) == 0 ? 1 : 2 + Below(random, 8);
                      sequences.push_back({std::min(rows, left), LogUniform(random, 1500) - 1});
                      left -= sequences.back().rows;
                    }
                    return sequences;
                  });
  }
}

TEST_F(AttentionFrontTest, RefusesWhatItCannotRun) {
  Batch batch({.heads = 4, .kv_heads = 2, .head_dim = 64, .page_size = 16}, {{1, 2000}}, 11);
  DeviceBatch device(batch);
  AttentionArgs args = device.Args();
  EXPECT_EQ(LaunchAttention(args, {}, {}).code(), absl::StatusCode::kInvalidArgument);
  args.kv.head_dim = 63;
  EXPECT_EQ(LaunchAttention(args, {}, {}).code(), absl::StatusCode::kInvalidArgument);
  args = device.Args();
  args.heads = 3;
  EXPECT_EQ(LaunchAttention(args, {}, {}).code(), absl::StatusCode::kInvalidArgument);
  args = device.Args();
  args.sequences.device = nullptr;
  EXPECT_EQ(LaunchAttention(args, {}, {}).code(), absl::StatusCode::kInvalidArgument);
  args = device.Args();
  args.heads = 0;  // a rank without heads
  EXPECT_TRUE(LaunchAttention(args, {}, {}).ok());
}

}  // namespace
}  // namespace isobit::cuda
