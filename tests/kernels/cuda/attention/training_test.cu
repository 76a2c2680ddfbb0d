// Attention of training and its gradient against the oracle, bit for bit.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/contract/attention.h"
#include "kernels/contract/mma16.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/sm90/attention/training.h"
#include "kernels/oracle/oracle_backend.h"
#include "tests/kernels/cpu/op_cases.h"
#include "tests/kernels/cuda/device_case.h"

namespace isobit::cuda {
namespace {

using testing_support::DeviceBuffer;
using testing_support::Family;
using testing_support::Random;
using testing_support::RandomBf16;
using testing_support::SameBits;
using testing_support::Scaled;

constexpr Bf16 kPoison = 0xffff;

struct Shape {
  int32_t head_dim = 128;
  int32_t heads = 1;
  int32_t kv_heads = 1;
  int64_t window = 0;
  std::vector<int32_t> lengths;
  int32_t before = 0;  // rows of no sequence before the first
  int32_t after = 0;   // and after the last
  Family family = Family::kNormal;
  float query_scale = 1.0f;  // large: sharp softmax

  int32_t rows() const {
    int32_t n = before + after;
    for (const int32_t length : lengths) n += length;
    return n;
  }
};

std::string Describe(const Shape& s) {
  return absl::StrCat("head_dim ", s.head_dim, ", heads ", s.heads, "/", s.kv_heads, ", window ",
                      s.window, ", lengths ", absl::StrJoin(s.lengths, " "), ", rows before ",
                      s.before, ", after ", s.after, ", family ", static_cast<int>(s.family),
                      ", query scale ", s.query_scale);
}

// A pass in host memory, with what the oracle makes of it. Rows of no sequence are NaN in every
// operand.
struct Case {
  Shape shape;
  std::vector<int32_t> bounds;
  std::vector<Bf16> q, k, v, dout;
  std::vector<Bf16> out, dq, dk, dv;
  std::vector<float> log_sums;

  int64_t width() const { return int64_t{shape.heads} * shape.head_dim; }
  int64_t kv_width() const { return int64_t{shape.kv_heads} * shape.head_dim; }
};

std::vector<int32_t> Bounds(const Shape& shape) {
  std::vector<int32_t> bounds = {shape.before};
  for (const int32_t length : shape.lengths) bounds.push_back(bounds.back() + length);
  return bounds;
}

Case MakeCase(const Shape& shape, uint64_t seed) {
  Random random(seed);
  Case c{.shape = shape};
  const int64_t rows = shape.rows();
  c.bounds = Bounds(shape);
  const auto fill = [&](int64_t width) {
    std::vector<Bf16> x = RandomBf16(shape.family, rows * width, random);
    std::fill_n(x.begin(), shape.before * width, kPoison);
    std::fill(x.begin() + c.bounds.back() * width, x.end(), kPoison);
    return x;
  };
  c.q = fill(c.width());
  c.k = fill(c.kv_width());
  c.v = fill(c.kv_width());
  c.dout = fill(c.width());
  for (Bf16& x : c.q) {
    x = contract::FloatToBf16(contract::Mul(contract::Bf16ToFloat(x), shape.query_scale));
  }
  return c;
}

TrainingAttentionArgs ForwardArgs(const Case& c, const Bf16* q, const Bf16* k, const Bf16* v,
                                  Bf16* out, float* log_sums, const int32_t* device_bounds) {
  return {.q = q,
          .k = k,
          .v = v,
          .rows = c.shape.rows(),
          .heads = c.shape.heads,
          .kv_heads = c.shape.kv_heads,
          .head_dim = c.shape.head_dim,
          .sequences = {.bounds = c.bounds, .device_bounds = device_bounds},
          .scale = contract::AttentionScale(c.shape.head_dim),
          .window = c.shape.window,
          .out = out,
          .log_sums = log_sums};
}

void RunOracle(Case* c) {
  OracleBackend ops;
  const auto rows = static_cast<size_t>(c->shape.rows());
  c->out.assign(rows * static_cast<size_t>(c->width()), kPoison);
  c->dq = c->out;
  c->dk.assign(rows * static_cast<size_t>(c->kv_width()), kPoison);
  c->dv = c->dk;
  c->log_sums.assign(rows * static_cast<size_t>(c->shape.heads), contract::FromBits(0xffffffffu));
  const TrainingAttentionArgs forward = ForwardArgs(*c, c->q.data(), c->k.data(), c->v.data(),
                                                    c->out.data(), c->log_sums.data(), nullptr);
  EXPECT_TRUE(ops.Run(forward).ok());
  EXPECT_TRUE(ops.Run(AttentionGradientArgs{.forward = forward,
                                            .dout = c->dout.data(),
                                            .dq = c->dq.data(),
                                            .dk = c->dk.data(),
                                            .dv = c->dv.data()})
                  .ok());
}

absl::Span<std::byte> Whole(DeviceBuffer<std::byte>& memory) {
  return {memory.data(), static_cast<size_t>(memory.size())};
}

// The results of the kernels, over the same operands.
struct Results {
  std::vector<Bf16> out, dq, dk, dv;
  std::vector<float> log_sums;
  int64_t scores_written = 0;  // elements of the workspace for the scores' gradients
};

// A workspace that holds the scores' gradients of so many KV heads.
size_t WorkspaceFor(const AttentionGradientArgs& args, int32_t kv_heads) {
  const size_t least = AttentionGradientWorkspaceBytes(kH200, args, 0);
  const size_t all = AttentionGradientWorkspaceBytes(kH200, args, SIZE_MAX);
  return least +
         (all - least) / static_cast<size_t>(args.forward.kv_heads) * static_cast<size_t>(kv_heads);
}

// Elements of 16 bits after the first `from` bytes that are poison no more.
int64_t CountWritten(const std::vector<std::byte>& memory, size_t from) {
  int64_t written = 0;
  for (size_t i = from; i + 1 < memory.size(); i += 2) {
    written += memory[i] != std::byte{0xff} || memory[i + 1] != std::byte{0xff} ? 1 : 0;
  }
  return written;
}

// at_a_time: the scores' gradients of so many KV heads are in memory at a time; 0: they are
// computed again.
Results RunDevice(const Case& c, int32_t at_a_time) {
  const int64_t rows = c.shape.rows();
  DeviceBuffer<int32_t> bounds(c.bounds);
  DeviceBuffer<Bf16> q(c.q), k(c.k), v(c.v), dout(c.dout);
  DeviceBuffer<Bf16> out(rows * c.width()), dq(rows * c.width());
  DeviceBuffer<Bf16> dk(rows * c.kv_width()), dv(rows * c.kv_width());
  DeviceBuffer<float> log_sums(rows * c.shape.heads);
  const TrainingAttentionArgs forward =
      ForwardArgs(c, q.data(), k.data(), v.data(), out.data(), log_sums.data(), bounds.data());
  const Stream stream = {.handle = nullptr, .dependent = false};
  EXPECT_EQ(cuda::Run(forward, stream), absl::OkStatus());
  const AttentionGradientArgs gradient = {
      .forward = forward, .dout = dout.data(), .dq = dq.data(), .dk = dk.data(), .dv = dv.data()};
  DeviceBuffer<std::byte> workspace(static_cast<int64_t>(WorkspaceFor(gradient, at_a_time)));
  EXPECT_EQ(LaunchAttentionGradient(gradient, Whole(workspace), stream), absl::OkStatus());
  Results r = {out.CopyOut(), dq.CopyOut(), dk.CopyOut(), dv.CopyOut(), log_sums.CopyOut()};
  r.scores_written = CountWritten(workspace.CopyOut(), WorkspaceFor(gradient, 0));
  EXPECT_TRUE(out.GuardsIntact() && dq.GuardsIntact() && dk.GuardsIntact() && dv.GuardsIntact() &&
              log_sums.GuardsIntact() && workspace.GuardsIntact());
  return r;
}

void ExpectOracleBits(const Case& c, int32_t at_a_time) {
  SCOPED_TRACE(absl::StrCat(Describe(c.shape), ", KV heads at a time: ", at_a_time));
  const Results r = RunDevice(c, at_a_time);
  EXPECT_TRUE(SameBits<Bf16>(r.out, c.out)) << "out";
  EXPECT_TRUE(SameBits<float>(r.log_sums, c.log_sums)) << "log_sums";
  EXPECT_TRUE(SameBits<Bf16>(r.dv, c.dv)) << "dv";
  EXPECT_TRUE(SameBits<Bf16>(r.dk, c.dk)) << "dk";
  EXPECT_TRUE(SameBits<Bf16>(r.dq, c.dq)) << "dq";
}

// The oracle is slow, so it takes a case on every core.
void ExpectOracleBits(const std::vector<Shape>& shapes, uint64_t seed) {
  std::vector<Case> cases;
  for (size_t i = 0; i < shapes.size(); ++i) cases.push_back(MakeCase(shapes[i], seed + i));
  std::atomic<size_t> next = 0;
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i) {
    threads.emplace_back([&] {
      for (size_t at = next++; at < cases.size(); at = next++) RunOracle(&cases[at]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Case& c : cases) {
    for (int32_t at_a_time = 0; at_a_time <= c.shape.kv_heads; ++at_a_time) {
      ExpectOracleBits(c, at_a_time);
    }
    if (testing::Test::HasFailure()) return;
  }
}

constexpr int32_t kHeadDims[] = {64, 96, 128, 256};

using TrainingAttentionTest = testing_support::GpuTest;

TEST_F(TrainingAttentionTest, EveryLengthAroundATile) {
  std::vector<Shape> shapes;
  for (const int32_t d : kHeadDims) {
    for (const int32_t n : {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 300}) {
      shapes.push_back({.head_dim = d, .lengths = {n}, .after = n % 3 * 5});
    }
  }
  ExpectOracleBits(shapes, 1);
}

TEST_F(TrainingAttentionTest, SeveralSequences) {
  std::vector<Shape> shapes;
  for (const int32_t d : kHeadDims) {
    shapes.push_back({.head_dim = d,
                      .heads = 2,
                      .kv_heads = 1,
                      .lengths = {7, 0, 130, 1, 64, 0, 99},
                      .before = 3,
                      .after = 20});
  }
  ExpectOracleBits(shapes, 100);
}

TEST_F(TrainingAttentionTest, SeveralSplits) {
  std::vector<Shape> shapes;
  for (const int32_t d : kHeadDims) shapes.push_back({.head_dim = d, .lengths = {33, 700}});
  ExpectOracleBits(shapes, 200);
}

TEST_F(TrainingAttentionTest, EveryGroupSize) {
  std::vector<Shape> shapes;
  for (const int32_t d : kHeadDims) {
    for (const int32_t group : {1, 2, 3, 4, 8}) {
      shapes.push_back(
          {.head_dim = d, .heads = 2 * group, .kv_heads = 2, .lengths = {70, 140}, .after = 1});
    }
  }
  ExpectOracleBits(shapes, 300);
}

TEST_F(TrainingAttentionTest, Windows) {
  std::vector<Shape> shapes;
  for (const int32_t d : kHeadDims) {
    for (const int64_t w : {1, 2, 17, 63, 64, 65, 127, 128, 129, 250, 1 << 30}) {
      shapes.push_back({.head_dim = d, .window = w, .lengths = {5, 333}});
    }
  }
  ExpectOracleBits(shapes, 400);
}

// Sizes that run on a larger schedule.
TEST_F(TrainingAttentionTest, OtherHeadSizes) {
  std::vector<Shape> shapes;
  for (int32_t d = 8; d <= 256; d += 8) {
    shapes.push_back(
        {.head_dim = d, .heads = 4, .kv_heads = 2, .lengths = {20, 150}, .before = 1, .after = 2});
  }
  ExpectOracleBits(shapes, 500);
}

TEST_F(TrainingAttentionTest, RandomShapes) {
  Random random(7);
  const auto below = [&](int64_t n) {
    return static_cast<int32_t>(random() % static_cast<uint64_t>(n));
  };
  std::vector<Shape> shapes;
  for (int i = 0; i < Scaled(150); ++i) {
    Shape s;
    s.head_dim = below(4) == 0 ? 8 + 8 * below(32) : kHeadDims[below(4)];
    s.kv_heads = 1 + below(3);
    const int32_t kGroups[] = {1, 2, 4, 8};
    s.heads = s.kv_heads * kGroups[below(below(3) == 0 ? 4 : 2)];
    s.window = below(3) == 0 ? 1 + below(200) : 0;
    const int32_t count = 1 + below(4);
    for (int32_t n = 0; n < count; ++n) s.lengths.push_back(below(below(4) == 0 ? 400 : 140));
    s.before = below(3) * below(40);
    s.after = below(2) * below(150);
    s.family = testing_support::kFamilies[below(4)];
    s.query_scale = below(3) == 0 ? 16.0f : 1.0f;
    shapes.push_back(s);
  }
  ExpectOracleBits(shapes, 600);
}

// A sequence with values that are not finite changes no other.
TEST_F(TrainingAttentionTest, SequencesDoNotMeet) {
  for (const int32_t d : kHeadDims) {
    const Shape shape = {.head_dim = d, .heads = 2, .lengths = {90, 40, 75}};
    Case c = MakeCase(shape, 800);
    const Results clean = RunDevice(c, 1);
    const auto spoil = [&](std::vector<Bf16>* x, int64_t width) {
      std::fill(x->begin() + c.bounds[1] * width, x->begin() + c.bounds[2] * width, kPoison);
    };
    spoil(&c.q, c.width());
    spoil(&c.k, c.kv_width());
    spoil(&c.v, c.kv_width());
    spoil(&c.dout, c.width());
    const Results spoilt = RunDevice(c, 1);
    const auto expect_same = [&](const std::vector<Bf16>& a, const std::vector<Bf16>& b,
                                 int64_t width) {
      const auto rows = [&](const std::vector<Bf16>& x, int i) {
        return std::span<const Bf16>(x).subspan(
            static_cast<size_t>(c.bounds[i] * width),
            static_cast<size_t>((c.bounds[i + 1] - c.bounds[i]) * width));
      };
      EXPECT_TRUE(SameBits<Bf16>(rows(a, 0), rows(b, 0)));
      EXPECT_TRUE(SameBits<Bf16>(rows(a, 2), rows(b, 2)));
      EXPECT_FALSE(SameBits<Bf16>(rows(a, 1), rows(b, 1)));
    };
    expect_same(clean.out, spoilt.out, c.width());
    expect_same(clean.dq, spoilt.dq, c.width());
    expect_same(clean.dk, spoilt.dk, c.kv_width());
    expect_same(clean.dv, spoilt.dv, c.kv_width());
  }
}

// Log-sums beyond the range of BoundedExp2.
TEST_F(TrainingAttentionTest, HugeScores) {
  std::vector<Shape> shapes;
  for (const int32_t d : kHeadDims) {
    shapes.push_back({.head_dim = d, .lengths = {150}, .query_scale = 0x1p40f});
  }
  ExpectOracleBits(shapes, 900);
}

// Control: with the keys ascending, dQ has other bits, so the tests above would show it.
TEST_F(TrainingAttentionTest, TheOrderOfKeysShows) {
  Case c = MakeCase({.head_dim = 64, .lengths = {300}}, 1000);
  RunOracle(&c);
  const int64_t n = 300;
  const int64_t d = 64;
  std::vector<Bf16> ascending, descending;
  for (int64_t i = 0; i < n; ++i) {
    float output_dot = 0.0f;
    contract::TreeSum tree;
    for (int64_t e = 0; e < d; e += 4) {
      float a[4], b[4];
      for (int64_t j = 0; j < 4; ++j) {
        a[j] = contract::Bf16ToFloat(c.dout[i * d + e + j]);
        b[j] = contract::Bf16ToFloat(c.out[i * d + e + j]);
      }
      tree.Push(contract::DotLeaf(a, b));
    }
    output_dot = tree.Total();
    std::vector<Bf16> ds(static_cast<size_t>(n + 16));
    for (int64_t j = 0; j <= i; ++j) {
      const float score = contract::DotChain(0.0f, &c.q[i * d], &c.k[j * d], d);
      const float e = contract::DotChain(0.0f, &c.dout[i * d], &c.v[j * d], d);
      const float p = contract::AttentionWeight(score, contract::AttentionScale(64),
                                                c.log_sums[static_cast<size_t>(i)]);
      ds[static_cast<size_t>(j)] = contract::ScoreGradient(p, e, output_dot);
    }
    for (int64_t column = 0; column < d; ++column) {
      std::vector<Bf16> key(static_cast<size_t>(n + 16));
      for (int64_t j = 0; j < n; ++j) key[static_cast<size_t>(j)] = c.k[j * d + column];
      float up = 0.0f;
      float down = 0.0f;
      for (int64_t step = 0; step <= i / 16; ++step) {
        up = contract::DotChain(up, &ds[step * 16], &key[step * 16], 16);
        const int64_t last = i / 16 - step;
        down = contract::DotChain(down, &ds[last * 16], &key[last * 16], 16);
      }
      const float r = contract::GradientScale(64);
      ascending.push_back(contract::FloatToBf16(contract::Mul(up, r)));
      descending.push_back(contract::FloatToBf16(contract::Mul(down, r)));
    }
  }
  EXPECT_TRUE(SameBits<Bf16>(descending, c.dq));
  EXPECT_FALSE(SameBits<Bf16>(ascending, c.dq));
}

// Control: a workspace for n of five KV heads, taken in equal parts, is written as far as the
// part's last head. What was not written is 0xffff, a NaN.
TEST_F(TrainingAttentionTest, TheWorkspaceChoosesTheSchedule) {
  const Case c = MakeCase({.heads = 5, .kv_heads = 5, .lengths = {70}}, 1100);
  constexpr int64_t kHeadScores = 3 * 64 * 64;  // three pairs of tiles
  constexpr int64_t kHeadsWritten[] = {0, 1, 2, 3, 3, 5};
  for (int32_t n = 0; n <= 5; ++n) {
    const Results r = RunDevice(c, n);
    EXPECT_EQ(r.scores_written, kHeadsWritten[n] * kHeadScores) << n;
  }
}

// How many KV heads the workspace holds that AttentionGradientWorkspaceBytes asks for.
int64_t HeadsAtATime(const Shape& s) {
  const Case c = {.shape = s, .bounds = Bounds(s)};
  const AttentionGradientArgs args = {
      .forward = ForwardArgs(c, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr)};
  const size_t bytes = AttentionGradientWorkspaceBytes(kH200, args);
  for (int32_t n = 0; n <= s.kv_heads; ++n) {
    if (WorkspaceFor(args, n) == bytes) return n;
  }
  return -1;
}

TEST(AttentionGradientWorkspace, IsBoundedAndPays) {
  const auto heads = [](int32_t head_dim, int32_t query_heads, std::vector<int32_t> lengths) {
    return HeadsAtATime(
        {.head_dim = head_dim, .heads = query_heads, .kv_heads = 8, .lengths = std::move(lengths)});
  };
  EXPECT_EQ(heads(128, 32, std::vector<int32_t>(16, 1024)), 8);
  EXPECT_EQ(heads(128, 32, {8192, 8192}), 4);
  EXPECT_EQ(heads(128, 32, {16384}), 2);
  // One head fits, but its 128 blocks are too few.
  EXPECT_EQ(heads(128, 40, {16384}), 0);
  EXPECT_EQ(heads(256, 40, {16384}), 1);
  EXPECT_EQ(heads(128, 32, {32768}), 0);
}

TEST(TrainingAttentionArguments, AreChecked) {
  const int32_t bounds[] = {0, 4};
  TrainingAttentionArgs args = {
      .rows = 4, .heads = 2, .kv_heads = 1, .head_dim = 20, .sequences = {.bounds = bounds}};
  EXPECT_EQ(cuda::Run(args, {}).code(), absl::StatusCode::kInvalidArgument);
  args.head_dim = 64;
  args.q = reinterpret_cast<const Bf16*>(8);
  EXPECT_EQ(cuda::Run(args, {}).code(), absl::StatusCode::kInvalidArgument);
  args.q = nullptr;
  args.rows = 3;
  EXPECT_EQ(cuda::Run(args, {}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(LaunchAttentionGradient({.forward = args}, {}, {}).code(),
            absl::StatusCode::kInvalidArgument);
  args.rows = 4;
  EXPECT_THAT(std::string(LaunchAttentionGradient({.forward = args}, {}, {}).message()),
              testing::HasSubstr("needs a workspace of 512 bytes; got 0"));
}

}  // namespace
}  // namespace isobit::cuda
