// The decode schedules of attention, and its walk, against the CPU backend, bit for bit.
#include <algorithm>
#include <cstdio>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/cuda/attention/batch.h"

namespace isobit::cuda {
namespace {

using AttentionDecodeTest = testing_support::GpuTest;

TEST_F(AttentionDecodeTest, RandomBatches) {
  Random random(1);
  const int cases = testing_support::Scaled(1500);
  for (int i = 0; i < cases; ++i) {
    const Shape shape = RandomShape(random);
    const int64_t tokens = 1 + Below(random, 3) * Below(random, 3);
    Batch batch(shape, RandomRows(random, tokens, i % 10 == 0 ? 3000 : 700), random());
    DeviceBatch device(batch);
    device.ExpectOfEverySchedule(batch.Expected(), static_cast<int32_t>(tokens));
    ASSERT_FALSE(HasFailure()) << "case " << i;
  }
  std::printf("%d decode batches\n", cases);
}

TEST_F(AttentionDecodeTest, WalksOfRandomBatches) {
  Random random(2);
  const int cases = testing_support::Scaled(500);
  for (int i = 0; i < cases; ++i) {
    const Shape shape = RandomShape(random);
    Batch batch(shape, RandomRows(random, 40, 1200), random());
    DeviceBatch device(batch);
    ASSERT_TRUE(SameBits<Bf16>(device.Walk(), batch.Expected()))
        << "case " << i << ": " << shape.Describe();
  }
  std::printf("%d walked batches\n", cases);
}

// More items than the GPU has teams, so that every team takes several.
TEST_F(AttentionDecodeTest, ManySequences) {
  Random random(4);
  for (const int32_t head_dim : {64, 128}) {
    for (const int32_t page_size : {8, 64}) {
      std::vector<Rows> sequences;
      const int count = std::max(20, testing_support::Scaled(200));
      for (int i = 0; i < count; ++i) sequences.push_back({1, Below(random, 1500)});
      Batch batch({.heads = 8, .kv_heads = 2, .head_dim = head_dim, .page_size = page_size},
                  sequences, random());
      DeviceBatch device(batch);
      device.ExpectOfEverySchedule(batch.Expected(), 1);
    }
  }
}

// More sequences than one launch lists; only the sequences at the ends have long contexts.
TEST_F(AttentionDecodeTest, ThousandsOfSequences) {
  std::vector<Rows> sequences;
  for (int i = 0; i < 2500; ++i) sequences.push_back({i % 7 == 3 ? 0 : 1, i % 60});
  sequences.front() = {1, 1300};
  sequences.back() = {1, 2200};
  Batch batch({.heads = 2, .kv_heads = 1, .head_dim = 64, .page_size = 16}, sequences, 5);
  DeviceBatch device(batch);
  EXPECT_TRUE(SameBits<Bf16>(device.Decode(1), batch.Expected()));
  EXPECT_TRUE(SameBits<Bf16>(device.Front(), batch.Expected()));
}

TEST_F(AttentionDecodeTest, LongContexts) {
  const int64_t share = testing_support::Scaled(16);  // of a context's sixteenths
  struct Long {
    int32_t heads;
    int32_t head_dim;
    int64_t window;
    int64_t position;
  };
  for (const Long& c : {Long{4, 128, 0, 131071}, Long{8, 64, 0, 131072}, Long{1, 256, 0, 100001},
                        Long{2, 128, 4096, 131071}, Long{1, 16, 0, 300000}}) {
    Batch batch({.heads = c.heads,
                 .kv_heads = 1,
                 .head_dim = c.head_dim,
                 .page_size = 64,
                 .window = c.window},
                {{1, c.position * share / 16}, {1, 5000}}, 6);
    DeviceBatch device(batch);
    const std::vector<Bf16> expected = batch.Expected();
    device.ExpectOfEverySchedule(expected, 1);
    EXPECT_TRUE(SameBits<Bf16>(device.Walk(), expected)) << c.head_dim;
  }
}

// Bounds for which the fold copies to shared memory: less than the 48 KB that a kernel may have
// without raising the limit, more than that, and less than that but more with its own variables.
TEST_F(AttentionDecodeTest, FoldsForEveryBound) {
  for (const int32_t head_dim : {96, 128, 256}) {
    Batch batch({.heads = 2, .kv_heads = 1, .head_dim = head_dim, .page_size = 64}, {{1, 5000}}, 8);
    const std::vector<Bf16> expected = batch.Expected();
    for (int32_t splits = 40; splits <= 140; splits += 2) {
      DeviceBatch device(batch, {.max_positions = splits * contract::kSplit});
      ASSERT_TRUE(SameBits<Bf16>(device.Decode(1), expected)) << head_dim << ", " << splits;
    }
  }
}

// Keys and queries with infinities and NaN; whole splits whose scores are all NaN or -inf.
TEST_F(AttentionDecodeTest, NonFiniteKeysAndQueries) {
  Random random(7);
  const int cases = testing_support::Scaled(120);
  for (int i = 0; i < cases; ++i) {
    Shape shape = RandomShape(random);
    const std::vector<Rows> sequences = RandomRows(random, 2, 1500);
    Batch batch(shape, sequences, random());
    const auto spoil = [&](std::vector<Bf16>& values, int64_t one_in) {
      for (Bf16& x : values) {
        if (x == kPoison || Below(random, one_in) != 0) continue;
        x = OneOf<Bf16>(random, {0x7f80, 0xff80, 0x7fff, 0x7f7f, 0xff7f});
      }
    };
    if (i % 3 == 0) spoil(batch.q(), 50);
    spoil(batch.k(), OneOf<int64_t>(random, {1, 20, 3000, 100000}));
    DeviceBatch device(batch);
    const std::vector<Bf16> expected = batch.Expected();
    device.ExpectOfEverySchedule(expected, 2);
    ASSERT_FALSE(HasFailure()) << "case " << i;
    ASSERT_TRUE(SameBits<Bf16>(device.Walk(), expected)) << i << ": " << shape.Describe();
  }
}

// Control test: moving the same keys to other positions changes bits. So the tests above would see
// a wrong order of splits, of tiles, of k16 steps or of row-sum lanes.
TEST_F(AttentionDecodeTest, OrderReachesTheBits) {
  // Many outputs, because rounding to bf16 hides most of a difference.
  const std::vector<Rows> sequences(64, {1, 1535});
  std::vector<int64_t> distances = {512, 128, 16, 8, 1};
  distances.resize(static_cast<size_t>(testing_support::Scaled(5)));
  for (const int64_t distance : distances) {
    Batch batch({.heads = 16, .kv_heads = 1, .head_dim = 128, .page_size = 1}, sequences, 8);
    const std::vector<Bf16> before = batch.Expected();
    // Swaps neighbouring runs of keys through the page table: the second with the third, and so on.
    // Not the first with the second, because the first addition of a chain commutes.
    for (std::vector<int32_t>& pages : batch.tables()) {
      for (int64_t i = distance; i + 2 * distance <= 1536; i += 2 * distance) {
        const auto run = pages.begin() + i;
        std::swap_ranges(run, run + distance, run + distance);
      }
    }
    const std::vector<Bf16> expected = batch.Expected();
    EXPECT_FALSE(SameBits<Bf16>(expected, before)) << distance;
    DeviceBatch device(batch);
    device.ExpectOfEverySchedule(expected, 1);
  }
}

}  // namespace
}  // namespace isobit::cuda
