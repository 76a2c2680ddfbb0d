// Decode attention of sequences that share splits, computed once for all of them, against the CPU
// backend, bit for bit. Which splits they share: tests/kernels/cuda/shared_splits_test.cc.
#include <algorithm>
#include <cstdio>
#include <type_traits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/common/step_tables/shared_splits.h"
#include "tests/kernels/cuda/attention/batch.h"
#include "tests/kernels/cuda/attention/write_late.cuh"

namespace isobit::cuda {
namespace {

constexpr DecodeSchedule kSharing = {DecodeSchedule::kSharingTeams};

using AttentionSharedTest = testing_support::GpuTest;

// Adds `count` sequences that begin with the same pages: all that lie in `prefix` positions, and
// the one that they end in if `round_up`. Each goes on for up to max_tail positions.
void AddGroup(std::vector<Rows>& sequences, int64_t count, int64_t prefix, int64_t max_tail,
              const Shape& shape, bool round_up, Random& random) {
  const int64_t up = round_up ? shape.page_size - 1 : 0;
  const int64_t pages = (prefix + up) / shape.page_size;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = pages * shape.page_size + LogUniform(random, max_tail) - 1;
    sequences.push_back({1, position, i == 0 ? 0 : pages});
  }
}

int64_t SavedSplits(Batch& batch) {
  std::vector<int32_t> own_split(batch.host().size());
  std::vector<SharedSplits> groups(batch.host().size());
  return FindSharedSplits(batch.host(), batch.shape().page_size, absl::MakeSpan(own_split),
                          absl::MakeSpan(groups));
}

std::vector<Bf16> RunAs(DeviceBatch& device, const DecodeSchedule& schedule) {
  return device.Run(
      [&](const AttentionArgs& args, const AttentionWorkspace& workspace, const Stream& s) {
        return LaunchDecodeAttentionAs(schedule, args, *args.sequences.device, 1, workspace, s);
      },
      DecodeWorkspaceBytes(device.Args(), device.sequences(), 1));
}

Shape SharedShape(Random& random) {
  Shape s;
  s.kv_heads = 1 + static_cast<int32_t>(Below(random, 2));
  s.heads = s.kv_heads * OneOf<int32_t>(random, {1, 3, 4, 8, 12});
  s.head_dim = OneOf(random, {16, 64, 72, 96, 128, 128, 130, 256});
  s.page_size = OneOf(random, {1, 3, 16, 128, 1024});
  s.window = OneOf<int64_t>(random, {0, 0, 0, 100, 700, 1000000});
  s.q_gap = OneOf<int64_t>(random, {0, 7});
  s.q_offset = OneOf<size_t>(random, {0, 2});
  s.family = testing_support::kFamilies[Below(random, 4)];
  return s;
}

// Groups, sequences alone and padding, behind one another.
TEST_F(AttentionSharedTest, RandomGroups) {
  Random random(1);
  const int cases = testing_support::Scaled(200);
  int64_t saved = 0;
  int shared = 0;
  for (int i = 0; i < cases; ++i) {
    const Shape shape = SharedShape(random);
    std::vector<Rows> sequences;
    const int64_t parts = 1 + Below(random, 5);
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t prefix = 512 * (1 + Below(random, 3)) + Below(random, 3) - 1;
      AddGroup(sequences, OneOf<int64_t>(random, {1, 1, 2, 3, 8, 17}), prefix, 700, shape,
               Below(random, 2) == 0, random);
      if (Below(random, 4) == 0) sequences.push_back({0, 0});
    }
    Batch batch(shape, sequences, random());
    const std::vector<Bf16> expected = batch.Expected();
    DeviceBatch device(batch, {.sharing = Sharing::kAlways});
    ASSERT_TRUE(SameBits<Bf16>(device.Front(), expected)) << i << ": " << shape.Describe();
    ASSERT_TRUE(SameBits<Bf16>(RunAs(device, {DecodeSchedule::kTeams}), expected))
        << i << ": " << shape.Describe();
    if (shape.window > 0 && shape.window < device.sequences().max_positions) continue;
    ASSERT_TRUE(SameBits<Bf16>(RunAs(device, kSharing), expected)) << i << ": " << shape.Describe();
    saved += SavedSplits(batch);
    ++shared;
  }
  std::printf("%d batches, %d of them sharing, %lld splits saved\n", cases, shared,
              static_cast<long long>(saved));
  EXPECT_GT(saved, shared);
}

// Prefixes of whole splits, one position less and one more; every size of group.
TEST_F(AttentionSharedTest, EverySizeOfGroupAndPage) {
  Random random(2);
  std::vector<int32_t> page_sizes = {16, 1, 3, 128, 1024};
  page_sizes.resize(static_cast<size_t>(testing_support::Scaled(5)));
  for (const int32_t page_size : page_sizes) {
    for (const int32_t head_dim : {64, 96, 128, 256}) {
      for (const int32_t heads_per_kv : {1, 4, 8}) {
        const Shape shape = {
            .heads = 2 * heads_per_kv, .kv_heads = 2, .head_dim = head_dim, .page_size = page_size};
        std::vector<Rows> sequences;
        for (const int64_t count : {1, 2, 3, 8, 17, 64}) {
          const int64_t prefix = 512 * (1 + Below(random, 3)) + Below(random, 3) - 1;
          AddGroup(sequences, count, prefix, 200, shape, Below(random, 2) == 0, random);
        }
        Batch batch(shape, sequences, random());
        DeviceBatch device(batch, {.sharing = Sharing::kAlways});
        ASSERT_TRUE(SameBits<Bf16>(RunAs(device, kSharing), batch.Expected())) << shape.Describe();
      }
    }
  }
}

// Groups within groups: a system prompt that all share, and prompts behind it.
TEST_F(AttentionSharedTest, PromptsBehindASystemPrompt) {
  Random random(3);
  const Shape shape = {.heads = 8, .kv_heads = 2, .head_dim = 128, .page_size = 16};
  std::vector<Rows> sequences;
  for (int prompt = 0; prompt < 6; ++prompt) {
    for (int sample = 0; sample < 5; ++sample) {
      const int64_t own = prompt == 0 && sample == 0 ? 0 : sample == 0 ? 32 : 32 * (1 + prompt % 3);
      sequences.push_back({1, 1600 + Below(random, 300), own});
    }
  }
  Batch batch(shape, sequences, 3);
  EXPECT_GE(SavedSplits(batch), 29 + 6 * 4);
  DeviceBatch device(batch, {.sharing = Sharing::kAlways});
  EXPECT_TRUE(SameBits<Bf16>(RunAs(device, kSharing), batch.Expected()));
}

// More sequences than one launch takes; a group at the border of two.
TEST_F(AttentionSharedTest, ThousandsOfSequences) {
  std::vector<Rows> sequences;
  for (int64_t i = 0; i < 2 * kSharingWindow + 100; ++i) {
    const bool long_one = i % kSharingWindow < 20 || i % kSharingWindow >= kSharingWindow - 20;
    const bool joins = long_one && i > 0 && sequences.back().first_position > 512;
    sequences.push_back({1, long_one ? 560 + i % 40 : i % 60, joins ? 32 : 0});
  }
  Batch batch({.heads = 4, .kv_heads = 1, .head_dim = 64, .page_size = 16}, sequences, 5);
  DeviceBatch device(batch, {.sharing = Sharing::kAlways});
  EXPECT_TRUE(device.sequences().shares);
  const std::vector<Bf16> expected = batch.Expected();
  EXPECT_TRUE(SameBits<Bf16>(RunAs(device, kSharing), expected));
  EXPECT_TRUE(SameBits<Bf16>(device.Front(), expected));
}

// Infinities and NaN among the shared keys and values' neighbours reach every row as they should.
TEST_F(AttentionSharedTest, NonFiniteKeys) {
  Random random(6);
  const int cases = testing_support::Scaled(20);
  for (int i = 0; i < cases; ++i) {
    Shape shape = SharedShape(random);
    shape.window = 0;
    std::vector<Rows> sequences;
    for (int group = 0; group < 3; ++group) {
      AddGroup(sequences, 1 + Below(random, 9), 1024, 300, shape, false, random);
    }
    Batch batch(shape, sequences, random());
    const auto one_in = OneOf<int64_t>(random, {20, 3000, 100000});
    for (Bf16& x : batch.k()) {
      if (x == kPoison || Below(random, one_in) != 0) continue;
      x = OneOf<Bf16>(random, {0x7f80, 0xff80, 0x7fff, 0x7f7f, 0xff7f});
    }
    DeviceBatch device(batch, {.sharing = Sharing::kAlways});
    ASSERT_TRUE(SameBits<Bf16>(RunAs(device, kSharing), batch.Expected()))
        << i << ": " << shape.Describe();
  }
}

// A window that may hide an early key keeps every sequence to itself; the launches say so.
TEST_F(AttentionSharedTest, WindowsAndTokensChooseTheSchedule) {
  Random random(7);
  for (const int64_t window : {0, 600, 4095, 4096}) {
    const Shape shape = {
        .heads = 16, .kv_heads = 2, .head_dim = 64, .page_size = 16, .window = window};
    std::vector<Rows> sequences;
    AddGroup(sequences, 30, 1024, 200, shape, false, random);
    Batch batch(shape, sequences, random());
    const StepBounds bounds = {.max_positions = 4096, .sharing = Sharing::kAlways};
    DeviceBatch device(batch, bounds);
    EXPECT_TRUE(device.sequences().shares);
    const bool sees_all = window == 0 || window == 4096;
    EXPECT_EQ(ChooseDecodeSchedule(kH200, device.Args(), device.sequences(), 1).kind,
              sees_all ? DecodeSchedule::kSharingTeams : DecodeSchedule::kTeams);
    EXPECT_EQ(ChooseDecodeSchedule(kH200, device.Args(), device.sequences(), 2).kind,
              DecodeSchedule::kTeams);
    EXPECT_TRUE(SameBits<Bf16>(device.Front(), batch.Expected())) << window;
    if (!sees_all) {
      EXPECT_EQ(
          LaunchDecodeAttentionAs(kSharing, device.Args(), device.sequences(), 1, {}, {}).code(),
          absl::StatusCode::kInvalidArgument);
    }
    DeviceBatch never(batch, {.max_positions = 4096, .sharing = Sharing::kNever});
    EXPECT_FALSE(never.sequences().shares);
    EXPECT_EQ(ChooseDecodeSchedule(kH200, never.Args(), never.sequences(), 1).kind,
              DecodeSchedule::kTeams);
    EXPECT_TRUE(SameBits<Bf16>(never.Front(), batch.Expected())) << window;
  }
}

// Shared keys may be read before the predecessor has ended, the members' own rows may not.
TEST_F(AttentionSharedTest, WaitsForThisStepsRows) {
  Random random(8);
  const int cases = testing_support::Scaled(20);
  for (int i = 0; i < cases; ++i) {
    Shape shape = SharedShape(random);
    shape.window = 0;
    std::vector<Rows> sequences;
    for (int group = 0; group < 4; ++group) {
      AddGroup(sequences, 1 + Below(random, 9), 512 * (1 + Below(random, 2)), 600, shape, false,
               random);
    }
    Batch batch(shape, sequences, random());
    const std::vector<Bf16> expected = batch.Expected();
    DeviceBuffer<Bf16> k(batch.k());
    DeviceBuffer<Bf16> v(batch.v());
    DeviceBuffer<Bf16> q(batch.q());
    const bool writes_past = i % 2 == 1;
    for (size_t s = 0; s < sequences.size(); ++s) {
      const int64_t end = sequences[s].first_position + 1;
      for (int64_t at = writes_past ? 0 : end - 1; at < end; ++at) {
        const int64_t page = batch.tables()[s][static_cast<size_t>(at / shape.page_size)];
        const int64_t keys = (page * shape.kv_heads) * shape.page_size + at % shape.page_size;
        for (int64_t h = 0; h < shape.kv_heads; ++h) {
          const int64_t slot = (keys + h * shape.page_size) * shape.head_dim;
          std::fill_n(batch.k().data() + slot, shape.head_dim, kPoison);
          std::fill_n(batch.v().data() + slot, shape.head_dim, kPoison);
        }
      }
    }
    std::ranges::fill(batch.q(), kPoison);
    DeviceBatch device(batch, {.writes_past = writes_past, .sharing = Sharing::kAlways});
    const std::vector<Bf16> actual = device.Run(
        [&](const AttentionArgs& args, const AttentionWorkspace& workspace, const Stream& s) {
          const absl::Status late = LaunchWriteLate(device, k, v, q, s);
          if (!late.ok()) return late;
          return LaunchDecodeAttentionAs(kSharing, args, *args.sequences.device, 1, workspace, s);
        },
        DecodeWorkspaceBytes(device.Args(), device.sequences(), 1));
    ASSERT_TRUE(SameBits<Bf16>(actual, expected)) << i << ": " << shape.Describe();
  }
}

// One captured call serves tables with groups, with other groups and with none.
TEST_F(AttentionSharedTest, GraphReplaysWithAndWithoutGroups) {
  Random random(10);
  const Shape shape = {.heads = 8, .kv_heads = 2, .head_dim = 128, .page_size = 16};
  const StepBounds bounds = {.num_rows = 40,
                             .num_sequences = 40,
                             .max_rows = 1,
                             .max_positions = 4096,
                             .sharing = Sharing::kAlways};
  Batch largest(shape, std::vector<Rows>(40, {1, 2000}), 1);
  DeviceBatch device(largest, bounds);
  ASSERT_TRUE(device.upload().Reserve(40, 40, 40 * 4096 / 16).ok());
  device.Upload(bounds);
  EXPECT_EQ(ChooseDecodeSchedule(kH200, device.Args(), device.sequences(), 1).kind,
            DecodeSchedule::kSharingTeams);
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
  for (int i = 0; i < 20; ++i) {
    std::vector<Rows> sequences;
    while (sequences.size() < 20) {
      const int64_t count = i % 3 == 2 ? 1 : OneOf<int64_t>(random, {1, 2, 8, 16});
      AddGroup(sequences, count, 512 * Below(random, 4), 400, shape, false, random);
    }
    Batch batch(shape, sequences, random());
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
  }
  ISOBIT_CHECK_CUDA(cudaGraphExecDestroy(exec));
  ISOBIT_CHECK_CUDA(cudaGraphDestroy(graph));
  ISOBIT_CHECK_CUDA(cudaStreamDestroy(stream));
}

// Control test: a group that is one split too long, or has too many sequences, changes bits.
TEST_F(AttentionSharedTest, AWrongGroupReachesTheBits) {
  const Shape shape = {.heads = 16, .kv_heads = 1, .head_dim = 128, .page_size = 16};
  std::vector<Rows> sequences = {{1, 1100}, {1, 1100, 32}, {1, 1100}, {1, 1100, 64}};
  Batch batch(shape, sequences, 11);
  const std::vector<Bf16> expected = batch.Expected();
  DeviceBatch device(batch, {.sharing = Sharing::kAlways});
  const auto write = [](const auto* to, const auto& from) {
    ISOBIT_CHECK_CUDA(
        cudaMemcpy(const_cast<std::remove_const_t<std::remove_pointer_t<decltype(to)>>*>(to),
                   from.data(), from.size() * sizeof(from[0]), cudaMemcpyDefault));
  };
  const std::vector<SharedSplits> right = {{0, 2, 0, 1}, {2, 2, 0, 2}, {}, {}};
  const std::vector<int32_t> right_own = {1, 1, 2, 2};
  write(device.sequences().groups, right);
  write(device.sequences().own_split, right_own);
  EXPECT_TRUE(SameBits<Bf16>(RunAs(device, kSharing), expected));
  write(device.sequences().groups, std::vector<SharedSplits>{{0, 2, 0, 2}, {2, 2, 0, 2}, {}, {}});
  write(device.sequences().own_split, std::vector<int32_t>{2, 2, 2, 2});
  EXPECT_FALSE(SameBits<Bf16>(RunAs(device, kSharing), expected));
  write(device.sequences().own_split, right_own);
  write(device.sequences().groups, std::vector<SharedSplits>{{0, 4, 0, 1}, {2, 2, 1, 2}, {}, {}});
  EXPECT_FALSE(SameBits<Bf16>(RunAs(device, kSharing), expected));
}

}  // namespace
}  // namespace isobit::cuda
