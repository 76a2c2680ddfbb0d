// The decode schedule of attention, its walk, and the front end that mixes schedules, against the
// CPU backend, bit for bit: random batches over scattered, poisoned pages.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/contract/attention.h"
#include "kernels/cuda/attention.h"
#include "kernels/cuda/attention_decode.h"
#include "kernels/cuda/device/dependent_launch.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/sequences.h"
#include "tests/kernels/cpu/op_cases.h"
#include "tests/kernels/cuda/device_case.h"

namespace isobit::cuda {
namespace {

using testing_support::DeviceBuffer;
using testing_support::Family;
using testing_support::Random;
using testing_support::RandomBf16;
using testing_support::SameBits;

constexpr Bf16 kPoison = 0xffff;

int64_t Below(Random& random, int64_t n) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
}
template <typename T>
T OneOf(Random& random, std::initializer_list<T> values) {
  return values.begin()[Below(random, static_cast<int64_t>(values.size()))];
}
// Between 1 and max, each binade as likely.
int64_t LogUniform(Random& random, int64_t max) {
  int64_t bound = 1;
  while (bound < max && Below(random, 8) != 0) bound *= 2;
  return 1 + Below(random, std::min(bound, max));
}

struct Rows {
  int64_t rows = 1;
  int64_t first_position = 0;
};

struct Shape {
  int32_t heads = 1;
  int32_t kv_heads = 1;
  int32_t head_dim = 128;
  int32_t page_size = 16;
  int64_t window = 0;
  int64_t q_gap = 0;    // ldq beyond the heads
  int64_t out_gap = 0;  // likewise ldo
  size_t q_offset = 0;  // bytes
  Family family = Family::kNormal;

  int64_t columns() const { return int64_t{heads} * head_dim; }
  std::string Describe() const {
    return absl::StrCat("heads ", heads, "/", kv_heads, " head_dim ", head_dim, " page ", page_size,
                        " window ", window);
  }
};

Ops& Reference() {
  static Ops* const ops =
      MakeCpuOps({.num_threads = static_cast<int>(std::thread::hardware_concurrency())}).release();
  return *ops;
}

// n random values: a run out of a pool, because drawing hundreds of millions takes long.
const Bf16* SomeOf(Family family, int64_t n, Random& random) {
  constexpr int64_t kPool = 1 << 20;
  static const auto* const pools = [] {
    auto* const all = new std::vector<std::vector<Bf16>>;
    Random pool_random(1000);
    for (const Family f : testing_support::kFamilies) {
      all->push_back(RandomBf16(f, kPool, pool_random));
    }
    return all;
  }();
  const auto& pool = (*pools)[static_cast<size_t>(family)];
  return pool.data() + Below(random, kPool - n);
}

// A batch in host memory: pages dealt out at random, everything unwritten a NaN.
class Batch {
 public:
  Batch(const Shape& shape, const std::vector<Rows>& sequences, uint64_t seed) : shape_(shape) {
    Random random(seed);
    int64_t pages = 2;
    for (const Rows& s : sequences) pages += PagesOf(s);
    std::vector<int32_t> free(static_cast<size_t>(pages));
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), random);
    const auto cache = static_cast<size_t>(pages * shape.kv_heads * shape.page_size) *
                       static_cast<size_t>(shape.head_dim);
    k_.assign(cache, kPoison);
    v_.assign(cache, kPoison);
    tables_.reserve(sequences.size());
    for (const Rows& s : sequences) {
      const auto count = static_cast<ptrdiff_t>(PagesOf(s));
      tables_.emplace_back(free.end() - count, free.end());
      free.resize(free.size() - static_cast<size_t>(count));
      host_.push_back({rows_, s.rows, s.first_position, tables_.back().data()});
      rows_ += s.rows;
      if (s.rows > 0) Fill(tables_.back(), s.first_position + s.rows, random);
    }
    q_.resize(static_cast<size_t>(rows_ * ldq()));
    for (int64_t r = 0; r < rows_; ++r) {
      std::copy_n(SomeOf(shape.family, ldq(), random), ldq(), q_.data() + r * ldq());
    }
  }

  const Shape& shape() const { return shape_; }
  std::vector<SequenceRows>& host() { return host_; }
  std::vector<std::vector<int32_t>>& tables() { return tables_; }
  std::vector<Bf16>& k() { return k_; }
  std::vector<Bf16>& v() { return v_; }
  std::vector<Bf16>& q() { return q_; }
  int64_t rows() const { return rows_; }
  int64_t ldq() const { return shape_.columns() + shape_.q_gap; }
  int64_t ldo() const { return shape_.columns() + shape_.out_gap; }

  AttentionArgs Args(const Bf16* q, Bf16* k, Bf16* v, Bf16* out) const {
    AttentionArgs args;
    args.q = q;
    args.ldq = ldq();
    args.heads = shape_.heads;
    args.sequences.host = host_;
    args.kv = {k, v, shape_.page_size, shape_.kv_heads, shape_.head_dim};
    args.scale = contract::AttentionScale(shape_.head_dim);
    args.window = shape_.window;
    args.out = out;
    args.ldo = ldo();
    return args;
  }

  // Poison where nothing is written.
  std::vector<Bf16> Expected() {
    std::vector<Bf16> out(static_cast<size_t>(rows_ * ldo()), kPoison);
    EXPECT_TRUE(Reference().Attention(Args(q_.data(), k_.data(), v_.data(), out.data())).ok());
    return out;
  }

 private:
  int64_t PagesOf(const Rows& s) const {
    return s.rows == 0 ? 0 : (s.first_position + s.rows + shape_.page_size - 1) / shape_.page_size;
  }
  void Fill(const std::vector<int32_t>& pages, int64_t positions, Random& random) {
    const int64_t d = shape_.head_dim;
    for (int64_t p = 0; p < positions; ++p) {
      for (int64_t h = 0; h < shape_.kv_heads; ++h) {
        const int64_t page = pages[static_cast<size_t>(p / shape_.page_size)];
        const int64_t slot = (page * shape_.kv_heads + h) * shape_.page_size + p % shape_.page_size;
        std::copy_n(SomeOf(shape_.family, d, random), d, k_.data() + slot * d);
        std::copy_n(SomeOf(shape_.family, d, random), d, v_.data() + slot * d);
      }
    }
  }

  Shape shape_;
  std::vector<SequenceRows> host_;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<Bf16> k_;
  std::vector<Bf16> v_;
  std::vector<Bf16> q_;
  int64_t rows_ = 0;
};

// The same batch in GPU memory.
class DeviceBatch {
 public:
  using Launcher =
      std::function<absl::Status(const AttentionArgs&, const AttentionWorkspace&, const Stream&)>;

  explicit DeviceBatch(Batch& batch, const StepBounds& bounds = {})
      : batch_(batch),
        k_(batch.k()),
        v_(batch.v()),
        q_(batch.q(), batch.shape().q_offset),
        out_(batch.rows() * batch.ldo()) {
    Stage(bounds);
  }

  void Stage(const StepBounds& bounds, cudaStream_t stream = nullptr) {
    const std::vector<int32_t> ids(static_cast<size_t>(batch_.rows()), 1);
    const absl::Status status =
        stage_.Stage(ids, batch_.host(), batch_.shape().page_size, bounds, stream);
    EXPECT_TRUE(status.ok()) << status;
  }

  AttentionArgs Args() {
    AttentionArgs args = batch_.Args(q_.data(), k_.data(), v_.data(), out_.data());
    args.sequences.device = &stage_.device();
    return args;
  }
  const DeviceSequences& sequences() const { return stage_.device(); }
  DeviceBuffer<Bf16>& out() { return out_; }
  DeviceBuffer<Bf16>& k() { return k_; }
  DeviceBuffer<Bf16>& v() { return v_; }
  DeviceBuffer<Bf16>& q() { return q_; }
  SequenceStage& stage() { return stage_; }

  // Launches into poisoned memory; what was written, and no guard touched.
  std::vector<Bf16> Run(const Launcher& launch, size_t workspace_bytes, const Stream& stream = {}) {
    out_.Poison();
    DeviceBuffer<std::byte> workspace(static_cast<int64_t>(workspace_bytes));
    const absl::Status status = launch(Args(), {workspace.data(), workspace_bytes}, stream);
    EXPECT_TRUE(status.ok()) << status;
    const std::vector<Bf16> actual = out_.CopyOut();
    EXPECT_TRUE(out_.GuardsIntact());
    EXPECT_TRUE(workspace.GuardsIntact());
    return actual;
  }
  std::vector<Bf16> Decode(int32_t max_tokens, const Stream& stream = {}) {
    return Run(
        [&](const AttentionArgs& args, const AttentionWorkspace& workspace, const Stream& s) {
          return LaunchDecodeAttention(args, *args.sequences.device, max_tokens, workspace, s);
        },
        DecodeWorkspaceBytes(Args(), sequences(), max_tokens), stream);
  }
  // By every schedule that can take the keys, clusters 1, 2 and 7 to a block of rows.
  void ExpectOfEverySchedule(const std::vector<Bf16>& expected, int32_t max_tokens) {
    const Shape& shape = batch_.shape();
    std::vector<DecodeSchedule> schedules = {{DecodeSchedule::kPairs}};
    if (shape.head_dim % 8 == 0) {
      for (const int clusters : {1, 2, 7}) {
        schedules.push_back({DecodeSchedule::kClusters, clusters});
      }
    }
    for (const DecodeSchedule& schedule : schedules) {
      const std::vector<Bf16> actual = Run(
          [&](const AttentionArgs& args, const AttentionWorkspace& workspace, const Stream& s) {
            return LaunchDecodeAttentionAs(schedule, args, *args.sequences.device, max_tokens,
                                           workspace, s);
          },
          DecodeWorkspaceBytes(Args(), sequences(), max_tokens));
      EXPECT_TRUE(SameBits<Bf16>(actual, expected))
          << "schedule " << schedule.kind << " " << schedule.clusters << ", " << shape.Describe();
    }
  }
  std::vector<Bf16> Walk() {
    return Run(
        [](const AttentionArgs& args, const AttentionWorkspace&, const Stream& s) {
          return LaunchWalkAttention(args, *args.sequences.device, 1, s);
        },
        0);
  }
  std::vector<Bf16> Front(const Stream& stream = {}) {
    return Run(LaunchAttention, AttentionWorkspaceBytes(Args()), stream);
  }

 private:
  Batch& batch_;
  DeviceBuffer<Bf16> k_;
  DeviceBuffer<Bf16> v_;
  DeviceBuffer<Bf16> q_;
  DeviceBuffer<Bf16> out_;
  SequenceStage stage_;
};

Shape RandomShape(Random& random) {
  Shape s;
  s.kv_heads = 1 + static_cast<int32_t>(Below(random, 3));
  s.heads = s.kv_heads * (1 + static_cast<int32_t>(Below(random, 16)));
  s.head_dim = OneOf(random, {2, 6, 16, 24, 32, 64, 64, 72, 80, 96, 128, 128, 128, 130, 144, 256});
  s.page_size = OneOf(random, {1, 3, 7, 8, 16, 16, 24, 32, 48, 64, 64, 128, 256, 1000, 1024});
  s.window = OneOf<int64_t>(random, {0, 0, 0, 0, 1, 40, 100, 129, 513, 1000, 100000});
  s.q_gap = OneOf<int64_t>(random, {0, 0, 8, 7});
  s.out_gap = OneOf<int64_t>(random, {0, 0, 8, 5});
  s.q_offset = OneOf<size_t>(random, {0, 0, 4, 2});
  s.family = testing_support::kFamilies[Below(random, 4)];
  return s;
}

std::vector<Rows> RandomRows(Random& random, int64_t max_rows, int64_t max_context) {
  std::vector<Rows> sequences(static_cast<size_t>(1 + Below(random, 8)));
  for (Rows& s : sequences) {
    s.rows = Below(random, max_rows + 1);  // 0: padding
    s.first_position = LogUniform(random, max_context) - 1;
  }
  sequences[0].rows = std::max<int64_t>(sequences[0].rows, 1);
  return sequences;
}

class AttentionDecodeTest : public testing::Test {
 protected:
  void SetUp() override { ISOBIT_SKIP_WITHOUT_GPU(); }
};
using AttentionFrontTest = AttentionDecodeTest;

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

// Some rows over a long context are decoded in several blocks, more rows prefilled.
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

// More items than a wave of the GPU, so that every pair of warps takes several.
TEST_F(AttentionDecodeTest, ManySequences) {
  Random random(4);
  for (const int32_t head_dim : {64, 128}) {
    for (const int32_t page_size : {8, 64}) {
      std::vector<Rows> sequences;
      for (int i = 0; i < 200; ++i) sequences.push_back({1, Below(random, 1500)});
      Batch batch({.heads = 8, .kv_heads = 2, .head_dim = head_dim, .page_size = page_size},
                  sequences, random());
      DeviceBatch device(batch);
      device.ExpectOfEverySchedule(batch.Expected(), 1);
    }
  }
}

// More than one launch lists, in which only the sequences at the ends have long contexts.
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
                {{1, c.position}, {1, 5000}}, 6);
    DeviceBatch device(batch);
    const std::vector<Bf16> expected = batch.Expected();
    device.ExpectOfEverySchedule(expected, 1);
    EXPECT_TRUE(SameBits<Bf16>(device.Walk(), expected)) << c.head_dim;
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

// The control: moving the same keys to another place of the order changes bits, so the tests above
// would see a wrong order of splits, of tiles, of k16 steps or of row-sum lanes.
TEST_F(AttentionDecodeTest, OrderReachesTheBits) {
  // Many outputs, because rounding to bf16 hides most of a difference.
  const std::vector<Rows> sequences(64, {1, 1535});
  for (const int64_t distance : {512, 128, 16, 8, 1}) {
    Batch batch({.heads = 16, .kv_heads = 1, .head_dim = 128, .page_size = 1}, sequences, 8);
    const std::vector<Bf16> before = batch.Expected();
    // Swaps neighbouring runs of keys through the page table: the second with the third, and so on,
    // because the first addition of a chain commutes.
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
         ++launch) {  // back to back: one may start before the last ends
      ASSERT_TRUE(
          LaunchAttention(first.Args(), {first_workspace.data(), bytes}, {streams[0]}).ok());
      ASSERT_TRUE(
          LaunchAttention(second.Args(), {second_workspace.data(), bytes}, {streams[1]}).ok());
    }
    ASSERT_TRUE(SameBits<Bf16>(first.out().CopyOut(), expected)) << round;
    ASSERT_TRUE(SameBits<Bf16>(second.out().CopyOut(), expected)) << round;
  }
  for (const cudaStream_t s : streams) ISOBIT_CHECK_CUDA(cudaStreamDestroy(s));
}

// Brings what differs, after as long a time as a step's earlier kernels may take.
__global__ void WriteLate(Bf16* to, const Bf16* from, int64_t n) {
  ReleaseSuccessor();
  WaitForPredecessor();
  for (const int64_t begin = clock64(); clock64() - begin < 100000;) {
  }
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += threads) {
    if (to[i] != from[i]) to[i] = from[i];
  }
}

// Attention may read the keys of earlier steps before its predecessor has ended, but nothing of
// what this step writes: be it the sequences' own rows, or all of what another part of the step
// left.
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
    const bool part_of_step = i % 3 == 0;
    for (size_t s = 0; s < sequences.size(); ++s) {
      const int64_t end = sequences[s].first_position + sequences[s].rows;
      for (int64_t position = part_of_step ? 0 : sequences[s].first_position; position < end;
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
    DeviceBatch device(batch, {.part_of_step = part_of_step});
    const std::vector<Bf16> actual = device.Run(
        [&](const AttentionArgs& args, const AttentionWorkspace& workspace, const Stream& s) {
          const Grid grid = {.blocks = dim3(64), .threads = dim3(512)};
          for (const auto& [to, from] : {std::pair(&device.k(), &k), std::pair(&device.v(), &v),
                                         std::pair(&device.q(), &q)}) {
            const absl::Status status =
                Launch(WriteLate, grid, s, to->data(), from->data(), from->size());
            if (!status.ok()) return status;
          }
          return LaunchAttention(args, workspace, s);
        },
        AttentionWorkspaceBytes(device.Args()));
    ASSERT_TRUE(SameBits<Bf16>(actual, expected)) << i << ": " << shape.Describe();
  }
}

// One captured call serves steps of other lengths, other numbers of sequences and other pages, up
// to its bounds.
TEST_F(AttentionFrontTest, GraphReplaysWithOtherTables) {
  Random random(10);
  const Shape shape = {.heads = 8, .kv_heads = 2, .head_dim = 64, .page_size = 16};
  const StepBounds bounds = {
      .num_rows = 8, .num_sequences = 8, .max_rows = 1, .max_positions = 4096};
  // The largest step first: its memory is what the graph holds.
  Batch largest(shape, std::vector<Rows>(8, {1, 3000}), 1);
  DeviceBatch device(largest, bounds);
  ASSERT_TRUE(device.stage().Reserve(8, 8, 8 * 4096 / 16).ok());
  device.Stage(bounds);
  const size_t bytes = AttentionWorkspaceBytes(device.Args());
  DeviceBuffer<std::byte> workspace(static_cast<int64_t>(bytes));

  cudaStream_t stream;
  ISOBIT_CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  ISOBIT_CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  ASSERT_TRUE(LaunchAttention(device.Args(), {workspace.data(), bytes}, {stream}).ok());
  ISOBIT_CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  ISOBIT_CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  const int64_t generation = device.stage().generation();
  for (int i = 0; i < 30; ++i) {
    std::vector<Rows> sequences(static_cast<size_t>(1 + Below(random, 8)));
    for (Rows& s : sequences) s = {Below(random, 5) == 0 ? 0 : 1, LogUniform(random, 3000) - 1};
    Batch batch(shape, sequences, random());
    device.k().CopyIn(batch.k());
    device.v().CopyIn(batch.v());
    device.q().CopyIn(batch.q());
    device.out().Poison();
    const std::vector<int32_t> ids(static_cast<size_t>(batch.rows()), 1);
    ASSERT_TRUE(device.stage().Stage(ids, batch.host(), shape.page_size, bounds, stream).ok());
    ISOBIT_CHECK_CUDA(cudaGraphLaunch(exec, stream));
    std::vector<Bf16> actual = device.out().CopyOut();
    actual.resize(static_cast<size_t>(batch.rows() * batch.ldo()));
    ASSERT_TRUE(SameBits<Bf16>(actual, batch.Expected())) << i;
  }
  EXPECT_EQ(device.stage().generation(), generation);
  ISOBIT_CHECK_CUDA(cudaGraphExecDestroy(exec));
  ISOBIT_CHECK_CUDA(cudaGraphDestroy(graph));
  ISOBIT_CHECK_CUDA(cudaStreamDestroy(stream));
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
