// The prefill schedule of attention against the CPU backend, bit for bit.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/contract/attention.h"
#include "kernels/cuda/common/step_tables/sequences.h"
#include "kernels/cuda/sm90/attention/bounded_exp2.cuh"
#include "kernels/cuda/sm90/attention/decode.h"
#include "kernels/cuda/sm90/attention/prefill.h"
#include "tests/kernels/cpu/op_cases.h"
#include "tests/kernels/cuda/device_case.h"

namespace isobit::cuda {
namespace {

using testing_support::DeviceBuffer;
using testing_support::Family;
using testing_support::OnH200;
using testing_support::Random;
using testing_support::RandomBf16;
using testing_support::SameBits;
using testing_support::Scaled;

constexpr Bf16 kPoison = 0xffff;
constexpr Bf16 kInf = 0x7f80;
constexpr Bf16 kNan = 0x7fc0;

struct Rows {
  int64_t first_position;
  int64_t num_rows;
};

struct Shape {
  int32_t head_dim = 128;
  int32_t heads = 1;
  int32_t kv_heads = 1;
  int32_t page_size = 16;
  int64_t window = 0;
  int64_t q_padding = 0;  // columns after a row of q or out
  int64_t out_padding = 0;
  std::vector<Rows> batch;
};

std::string Describe(const Shape& s) {
  std::string text = absl::StrCat("head_dim ", s.head_dim, ", heads ", s.heads, "/", s.kv_heads,
                                  ", page ", s.page_size, ", window ", s.window, ", padding ",
                                  s.q_padding, "/", s.out_padding, ", rows");
  for (const Rows& r : s.batch) absl::StrAppend(&text, " ", r.first_position, "+", r.num_rows);
  return text;
}

// A batch in host memory. The cache's pages are distributed at random; what no sequence has written
// is NaN.
struct Case {
  Shape shape;
  std::vector<Bf16> q;
  std::vector<Bf16> k;
  std::vector<Bf16> v;
  std::vector<std::vector<int32_t>> pages;
  std::vector<SequenceRows> sequences;
  int64_t rows = 0;

  int64_t ldq() const { return int64_t{shape.heads} * shape.head_dim + shape.q_padding; }
  int64_t ldo() const { return int64_t{shape.heads} * shape.head_dim + shape.out_padding; }
  Bf16* CacheRow(std::vector<Bf16>* cache, size_t sequence, int32_t kv_head, int64_t position) {
    const int64_t page = pages[sequence][static_cast<size_t>(position / shape.page_size)];
    return cache->data() +
           ((page * shape.kv_heads + kv_head) * shape.page_size + position % shape.page_size) *
               shape.head_dim;
  }
};

// Slices of one long random sequence: drawing new values for each case would take most of the time.
class Pool {
 public:
  explicit Pool(Family family) {
    Random random(static_cast<uint64_t>(family) + 5);
    values_ = RandomBf16(family, 1 << 20, random);
  }
  void Fill(Bf16* to, int64_t n, Random& random) const {
    for (int64_t i = 0; i < n;) {
      const auto begin = static_cast<int64_t>(random() % values_.size());
      const int64_t count = std::min(n - i, static_cast<int64_t>(values_.size()) - begin);
      std::copy_n(values_.data() + begin, count, to + i);
      i += count;
    }
  }
  static const Pool& Of(Family family) {
    static const auto* const pools = [] {
      auto* all = new std::vector<Pool>;
      for (const Family f : testing_support::kFamilies) all->emplace_back(f);
      return all;
    }();
    return (*pools)[static_cast<size_t>(family)];
  }

 private:
  std::vector<Bf16> values_;
};

Case MakeCase(const Shape& shape, Family family, Random& random) {
  Case c{.shape = shape};
  int64_t num_pages = 2;  // two belong to no sequence
  for (const Rows& r : shape.batch) {
    c.rows += r.num_rows;
    num_pages += (r.first_position + r.num_rows + shape.page_size - 1) / shape.page_size;
  }
  std::vector<int32_t> free_pages(static_cast<size_t>(num_pages));
  std::iota(free_pages.begin(), free_pages.end(), 0);
  std::shuffle(free_pages.begin(), free_pages.end(), random);

  const Pool& pool = Pool::Of(family);
  c.q.resize(static_cast<size_t>(c.rows * c.ldq()));
  pool.Fill(c.q.data(), c.rows * c.ldq(), random);
  const int64_t cache_size = num_pages * shape.kv_heads * shape.page_size * shape.head_dim;
  c.k.assign(static_cast<size_t>(cache_size), kPoison);
  c.v.assign(static_cast<size_t>(cache_size), kPoison);
  for (size_t s = 0; s < shape.batch.size(); ++s) {
    const int64_t end = shape.batch[s].first_position + shape.batch[s].num_rows;
    c.pages.emplace_back();
    for (int64_t p = 0; p < end; p += shape.page_size) {
      c.pages.back().push_back(free_pages.back());
      free_pages.pop_back();
    }
    for (int64_t p = 0; p < end; ++p) {
      for (int32_t h = 0; h < shape.kv_heads; ++h) {
        pool.Fill(c.CacheRow(&c.k, s, h, p), shape.head_dim, random);
        pool.Fill(c.CacheRow(&c.v, s, h, p), shape.head_dim, random);
      }
    }
  }
  int64_t row = 0;
  for (size_t s = 0; s < shape.batch.size(); ++s) {
    c.sequences.push_back(
        {row, shape.batch[s].num_rows, shape.batch[s].first_position, c.pages[s].data()});
    row += shape.batch[s].num_rows;
  }
  return c;
}

AttentionArgs ArgsOf(const Case& c, const Bf16* q, Bf16* k, Bf16* v, Bf16* out) {
  const Shape& s = c.shape;
  return {.q = q,
          .ldq = c.ldq(),
          .heads = s.heads,
          .sequences = {.host = c.sequences, .device = nullptr},
          .kv = {k, v, s.page_size, s.kv_heads, s.head_dim},
          .scale = contract::AttentionScale(s.head_dim),
          .window = s.window,
          .out = out,
          .ldo = c.ldo()};
}

std::vector<Bf16> RunCpu(Case& c) {
  static const std::unique_ptr<Backend> ops =
      MakeCpuBackend({.num_threads = static_cast<int>(std::thread::hardware_concurrency())});
  std::vector<Bf16> out(static_cast<size_t>(c.rows * c.ldo()), kPoison);
  EXPECT_TRUE(ops->Run(ArgsOf(c, c.q.data(), c.k.data(), c.v.data(), out.data())).ok());
  return out;
}

// A case in GPU memory.
class DeviceCase {
 public:
  // unaligned: q and out begin at odd multiples of 2 bytes.
  DeviceCase(const Case& c, bool unaligned)
      : case_(c),
        q_(c.q, unaligned ? 2 : 0),
        k_(c.k),
        v_(c.v),
        out_(c.rows * c.ldo(), unaligned ? 6 : 0) {
    Upload(c.sequences, {});
  }
  void Upload(const std::vector<SequenceRows>& sequences, const StepBounds& bounds) {
    const std::vector<int32_t> ids(static_cast<size_t>(case_.rows));
    EXPECT_TRUE(upload_.Upload(ids, sequences, case_.shape.page_size, bounds, nullptr).ok());
    ISOBIT_CHECK_CUDA(cudaDeviceSynchronize());
  }
  absl::Status Launch(cudaStream_t stream, int32_t min_rows = 1) {
    return LaunchPrefillAttention(ArgsOf(case_, q_.data(), k_.data(), v_.data(), out_.data()),
                                  upload_.device(), min_rows, {.handle = stream});
  }
  // The decode schedule over the same rows.
  std::vector<Bf16> RunDecode() {
    const AttentionArgs args = ArgsOf(case_, q_.data(), k_.data(), v_.data(), out_.data());
    const auto rows = static_cast<int32_t>(case_.rows);
    const size_t bytes = DecodeWorkspaceBytes(args, upload_.device(), rows);
    DeviceBuffer<std::byte> workspace(static_cast<int64_t>(bytes));
    out_.Poison();
    EXPECT_TRUE(
        LaunchDecodeAttention(args, upload_.device(), rows, {workspace.data(), bytes}, OnH200())
            .ok());
    return out_.CopyOut();
  }
  std::vector<Bf16> Run(int32_t min_rows = 1) {
    out_.Poison();
    EXPECT_TRUE(Launch(nullptr, min_rows).ok());
    std::vector<Bf16> out = out_.CopyOut();
    EXPECT_TRUE(out_.GuardsIntact());
    return out;
  }
  DeviceBuffer<Bf16>& out() { return out_; }

 private:
  const Case& case_;
  DeviceBuffer<Bf16> q_;
  DeviceBuffer<Bf16> k_;
  DeviceBuffer<Bf16> v_;
  DeviceBuffer<Bf16> out_;
  StepTableUpload upload_;
};

void ExpectCpuBits(Case c, bool unaligned = false) {
  SCOPED_TRACE(Describe(c.shape));
  const std::vector<Bf16> expected = RunCpu(c);
  DeviceCase device(c, unaligned);
  EXPECT_TRUE(SameBits<Bf16>(device.Run(), expected));
}

void ExpectCpuBits(const Shape& shape, Family family, uint64_t seed) {
  Random random(seed);
  ExpectCpuBits(MakeCase(shape, family, random));
}

constexpr int32_t kHeadDims[] = {64, 96, 128, 256};

using AttentionPrefillTest = testing_support::GpuTest;

TEST_F(AttentionPrefillTest, OneTile) {
  for (const int32_t d : kHeadDims) {
    for (const int64_t rows : {1, 2, 17, 63, 64}) {
      ExpectCpuBits({.head_dim = d, .page_size = 64, .batch = {{0, rows}}}, Family::kNormal, 1);
    }
  }
}

TEST_F(AttentionPrefillTest, SeveralSplits) {
  for (const int32_t d : kHeadDims) {
    ExpectCpuBits({.head_dim = d, .heads = 2, .page_size = 64, .batch = {{0, 1400}}},
                  Family::kNormal, 2);
    ExpectCpuBits({.head_dim = d, .heads = 2, .page_size = 64, .batch = {{1000, 300}, {513, 2}}},
                  Family::kNormal, 3);
  }
}

TEST_F(AttentionPrefillTest, EveryPageSize) {
  for (const int32_t d : kHeadDims) {
    for (const int32_t page : {1, 2, 7, 8, 16, 24, 32, 48, 64, 100, 128, 256, 2048}) {
      ExpectCpuBits({.head_dim = d,
                     .heads = 4,
                     .kv_heads = 2,
                     .page_size = page,
                     .batch = {{0, 70}, {30, 5}, {500, 190}}},
                    Family::kNormal, 4);
    }
  }
}

TEST_F(AttentionPrefillTest, EveryGroupSize) {
  for (const int32_t d : kHeadDims) {
    for (int32_t group = 1; group <= 16; ++group) {
      ExpectCpuBits({.head_dim = d,
                     .heads = 2 * group,
                     .kv_heads = 2,
                     .page_size = 32,
                     .window = group % 3 == 0 ? 90 : 0,
                     .batch = {{100, 41}, {0, 9}, {600, 3}}},
                    Family::kNormal, 5);
    }
  }
}

TEST_F(AttentionPrefillTest, Windows) {
  for (const int32_t d : kHeadDims) {
    for (const int64_t window : {1, 2, 63, 64, 65, 127, 128, 129, 512, 700, 1 << 30}) {
      ExpectCpuBits(
          {.head_dim = d, .page_size = 16, .window = window, .batch = {{0, 900}, {700, 81}}},
          Family::kNormal, 6);
    }
  }
}

// Random shapes of everything, over all families of operands.
TEST_F(AttentionPrefillTest, RandomShapes) {
  Random random(7);
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  const int cases = Scaled(500);
  int64_t sequences = 0;
  for (int i = 0; i < cases; ++i) {
    Shape s;
    s.head_dim = kHeadDims[below(4)];
    s.kv_heads = static_cast<int32_t>(1 + below(3));
    s.heads = s.kv_heads * static_cast<int32_t>(1 + below(below(4) == 0 ? 16 : 4));
    const int32_t kPages[] = {1, 3, 8, 16, 16, 24, 64, 64, 128, 256};
    s.page_size = kPages[below(10)];
    s.window = below(3) == 0 ? 1 + below(below(2) == 0 ? 200 : 1200) : 0;
    s.q_padding = below(2) * (1 + below(20));
    s.out_padding = below(2) * 8 * below(3) + below(3) % 2;
    const int64_t count = 1 + below(6);
    for (int64_t n = 0; n < count; ++n) {
      s.batch.push_back(
          {below(2) * below(below(4) == 0 ? 1500 : 200), 1 + below(below(4) == 0 ? 300 : 40)});
    }
    sequences += count;
    const Family family = testing_support::kFamilies[below(4)];
    ExpectCpuBits(MakeCase(s, family, random), below(3) == 0);
    if (HasFailure()) return;
  }
  std::printf("%d batches, %d sequences\n", cases, static_cast<int>(sequences));
}

// More sequences than lanes of a warp, most of them tiny.
TEST_F(AttentionPrefillTest, ManySequences) {
  Random random(8);
  Shape s{.head_dim = 64, .heads = 2, .kv_heads = 1, .page_size = 16};
  for (int i = 0; i < Scaled(150); ++i) {
    s.batch.push_back(
        {static_cast<int64_t>(random() % 300), static_cast<int64_t>(1 + random() % 90)});
  }
  ExpectCpuBits(s, Family::kNormal, 9);
}

// More blocks than the GPU holds at once, and many splits.
TEST_F(AttentionPrefillTest, LongSequences) {
  ExpectCpuBits({.head_dim = 128, .heads = 4, .kv_heads = 1, .page_size = 64, .batch = {{0, 6000}}},
                Family::kNormal, 10);
  ExpectCpuBits({.head_dim = 64, .heads = 4, .kv_heads = 2, .page_size = 16, .batch = {{0, 4100}}},
                Family::kNormal, 11);
  ExpectCpuBits(
      {.head_dim = 96, .heads = 3, .kv_heads = 3, .page_size = 16, .batch = {{9000, 600}}},
      Family::kNormal, 12);
  ExpectCpuBits({.head_dim = 256, .heads = 2, .kv_heads = 1, .page_size = 64, .batch = {{1, 3000}}},
                Family::kNormal, 13);
}

// Scores that overflow, infinities and NaN in q and k: whole rows, single keys, all keys of a tile.
TEST_F(AttentionPrefillTest, NonFiniteOperands) {
  for (const int32_t d : kHeadDims) {
    for (uint64_t seed = 0; seed < 24; ++seed) {
      Random random(seed * 100 + static_cast<uint64_t>(d));
      Case c = MakeCase({.head_dim = d,
                         .heads = 4,
                         .kv_heads = 2,
                         .page_size = 16,
                         .window = seed % 3 == 0 ? 150 : 0,
                         .batch = {{0, 300}, {470, 150}}},
                        Family::kNormal, random);
      const Bf16 kSpecials[] = {kInf, kInf | 0x8000, kNan, 0x7f00, 0xff00, 0x8000};
      const auto special = [&] { return kSpecials[random() % 6]; };
      for (int i = 0; i < Scaled(30); ++i) {
        c.q[random() % c.q.size()] = special();
        const size_t s = random() % 2;
        const auto position = static_cast<int64_t>(random() % (s == 0 ? 300 : 620));
        Bf16* const key = c.CacheRow(&c.k, s, static_cast<int32_t>(random() % 2), position);
        key[random() % static_cast<uint64_t>(d)] = special();
      }
      // A run of NaN keys: a key whose value is not finite is cached so. The rows at the start of
      // the run see no other key of the split, or no other key at all.
      const int64_t kRuns[] = {0, 128, 512, 256};
      for (int64_t p = kRuns[seed % 4]; p < kRuns[seed % 4] + 60; ++p) {
        for (const size_t s : {size_t{0}, size_t{1}}) {
          if (p >= (s == 0 ? 300 : 620)) continue;
          std::fill_n(c.CacheRow(&c.k, s, 0, p), d, kNan);
          std::fill_n(c.CacheRow(&c.v, s, 0, p), d, Bf16{0});
        }
      }
      ExpectCpuBits(std::move(c));
      if (HasFailure()) return;
    }
  }
}

TEST_F(AttentionPrefillTest, LeavesShorterSequencesAlone) {
  Random random(14);
  Case c = MakeCase({.head_dim = 128, .page_size = 16, .batch = {{5, 7}, {90, 8}, {0, 1}, {0, 40}}},
                    Family::kNormal, random);
  std::vector<Bf16> expected = RunCpu(c);
  const auto poison = [&](int64_t begin, int64_t end) {
    std::fill(expected.begin() + begin * 128, expected.begin() + end * 128, kPoison);
  };
  poison(0, 7);
  poison(15, 16);
  DeviceCase device(c, false);
  EXPECT_TRUE(SameBits<Bf16>(device.Run(8), expected));
}

TEST_F(AttentionPrefillTest, EqualsTheDecodeSchedule) {
  for (const int32_t d : kHeadDims) {
    Random random(18);
    const Case c = MakeCase({.head_dim = d,
                             .heads = 8,
                             .kv_heads = 2,
                             .page_size = 16,
                             .batch = {{700, 1}, {20000, 5}, {0, 30}, {1535, 2}}},
                            Family::kNormal, random);
    DeviceCase device(c, false);
    const std::vector<Bf16> prefill = device.Run();
    EXPECT_TRUE(SameBits<Bf16>(prefill, device.RunDecode())) << d;
  }
}

// Control test: the same keys at positions shifted by less than a tile give other bits. So the bits
// show where tiles and splits begin.
TEST_F(AttentionPrefillTest, TilesReachTheBits) {
  for (const int32_t d : kHeadDims) {
    Random random(15);
    Case c = MakeCase({.head_dim = d, .page_size = 16, .window = 300, .batch = {{0, 640}}},
                      Family::kNormal, random);
    Case shifted = MakeCase({.head_dim = d, .page_size = 16, .window = 300, .batch = {{16, 640}}},
                            Family::kNormal, random);
    for (int64_t p = 0; p < 640; ++p) {
      std::copy_n(c.CacheRow(&c.k, 0, 0, p), d, shifted.CacheRow(&shifted.k, 0, 0, p + 16));
      std::copy_n(c.CacheRow(&c.v, 0, 0, p), d, shifted.CacheRow(&shifted.v, 0, 0, p + 16));
    }
    shifted.q = c.q;
    std::vector<Bf16> a = DeviceCase(c, false).Run();
    std::vector<Bf16> b = DeviceCase(shifted, false).Run();
    a.erase(a.begin(), a.begin() + 300 * d);  // rows that the window does not yet bound
    b.erase(b.begin(), b.begin() + 300 * d);
    EXPECT_FALSE(SameBits<Bf16>(a, b)) << d;
  }
}

TEST_F(AttentionPrefillTest, RepeatedRunsAndStreams) {
  for (const int32_t d : kHeadDims) {
    Random random(16);
    Case c = MakeCase({.head_dim = d,
                       .heads = 8,
                       .kv_heads = 2,
                       .page_size = 16,
                       .batch = {{0, 700}, {800, 333}, {3, 50}}},
                      Family::kNormal, random);
    const std::vector<Bf16> expected = RunCpu(c);
    DeviceCase first(c, false);
    DeviceCase second(c, true);
    cudaStream_t streams[2];
    for (cudaStream_t& s : streams) ISOBIT_CHECK_CUDA(cudaStreamCreate(&s));
    for (int i = 0; i < Scaled(20); ++i) {
      ASSERT_TRUE(first.Launch(streams[0]).ok());
      ASSERT_TRUE(second.Launch(streams[1]).ok());
    }
    EXPECT_TRUE(SameBits<Bf16>(first.out().CopyOut(), expected));
    EXPECT_TRUE(SameBits<Bf16>(second.out().CopyOut(), expected));
    for (cudaStream_t& s : streams) ISOBIT_CHECK_CUDA(cudaStreamDestroy(s));
  }
}

// A graph captured over one step's tables serves another with the same bounds.
TEST_F(AttentionPrefillTest, GraphReplay) {
  Random random(17);
  Case c = MakeCase({.head_dim = 128,
                     .heads = 4,
                     .kv_heads = 2,
                     .page_size = 16,
                     .batch = {{0, 200}, {300, 100}, {40, 130}}},
                    Family::kNormal, random);
  const std::vector<Bf16> expected = RunCpu(c);
  DeviceCase device(c, false);
  const StepBounds bounds = {
      .num_rows = 512, .num_sequences = 8, .max_rows = 512, .max_positions = 4096};
  device.Upload({c.sequences[0]}, bounds);  // one sequence only

  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  ISOBIT_CHECK_CUDA(cudaStreamCreate(&stream));
  ISOBIT_CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  ASSERT_TRUE(device.Launch(stream).ok());
  ISOBIT_CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  ISOBIT_CHECK_CUDA(cudaGraphInstantiate(&replay, graph, 0));
  device.Upload(c.sequences, bounds);
  for (int i = 0; i < 3; ++i) {
    device.out().Poison();
    ISOBIT_CHECK_CUDA(cudaGraphLaunch(replay, stream));
    EXPECT_TRUE(SameBits<Bf16>(device.out().CopyOut(), expected));
  }
  ISOBIT_CHECK_CUDA(cudaGraphExecDestroy(replay));
  ISOBIT_CHECK_CUDA(cudaGraphDestroy(graph));
  ISOBIT_CHECK_CUDA(cudaStreamDestroy(stream));
}

TEST(AttentionPrefillArguments, AreChecked) {
  AttentionArgs args;
  args.kv.head_dim = 80;
  EXPECT_EQ(LaunchPrefillAttention(args, {}, 1, {}).code(), absl::StatusCode::kInvalidArgument);
  args.kv.head_dim = 64;
  args.kv.k = reinterpret_cast<Bf16*>(8);
  EXPECT_EQ(LaunchPrefillAttention(args, {}, 1, {}).code(), absl::StatusCode::kInvalidArgument);
}

// Counts the x <= 126 whose BoundedExp2 differs from the contract's exp2; NaN counts as NaN.
__global__ void CompareExp2(unsigned long long* differences) {
  unsigned long long count = 0;
  const uint64_t step = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t bits = blockIdx.x * blockDim.x + threadIdx.x; bits < uint64_t{1} << 32;
       bits += step) {
    const float x = contract::FromBits(static_cast<uint32_t>(bits));
    if (x > 126.0f) continue;
    float results[1] = {x};
    BoundedExp2(results);
    const float bounded = results[0];
    const float exact = contract::Exp2(x);
    if (exact != exact ? bounded == bounded
                       : contract::BitsOf(bounded) != contract::BitsOf(exact)) {
      ++count;
    }
  }
  atomicAdd(differences, count);
}

TEST(BoundedExp2Test, EveryArgument) {
  ISOBIT_SKIP_WITHOUT_GPU();
  DeviceBuffer<unsigned long long> differences(std::vector<unsigned long long>{0});
  CompareExp2<<<1056, 256>>>(differences.data());
  ISOBIT_CHECK_CUDA(cudaGetLastError());
  EXPECT_EQ(differences.CopyOut()[0], 0u);
}

}  // namespace
}  // namespace isobit::cuda
