// The row-wise CUDA kernels against the CPU backend, bit for bit: random shapes and alignments,
// every family of operands, infinities and NaN, repeated and replayed.
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cuda/device/swiglu.cuh"
#include "kernels/cuda/row_kernels.h"
#include "kernels/cuda/sequences.h"
#include "tests/kernels/cpu/op_cases.h"
#include "tests/kernels/cuda/device_case.h"

namespace isobit::cuda {
namespace {

using testing_support::DeviceBuffer;
using testing_support::Family;
using testing_support::kFamilies;
using testing_support::Random;
using testing_support::SameBits;
using testing_support::Scaled;

template <typename T>
std::span<const T> View(const std::vector<T>& v) {
  return v;
}

// Slices of values made once: drawing each case's own would cost more than the kernels.
class Operands {
 public:
  explicit Operands(Random& random) : random_(random) {
    for (const Family family : kFamilies) {
      floats_.push_back(testing_support::RandomFloats(family, kPool, random));
    }
  }

  // `specials`: a few values are infinities, NaN, subnormals or the largest finite ones.
  std::vector<float> Floats(int64_t n, bool specials) {
    const std::vector<float>& pool = floats_[random_() % floats_.size()];
    std::vector<float> values(static_cast<size_t>(n));
    size_t at = random_() % pool.size();
    for (float& value : values) {
      value = pool[at];
      at = at + 1 == pool.size() ? 0 : at + 1;
    }
    if (specials && n > 0) {
      for (int i = 0; i < 4; ++i) values[random_() % values.size()] = Special();
    }
    return values;
  }
  std::vector<Bf16> Bf16s(int64_t n, bool specials) {
    const std::vector<float> floats = Floats(n, specials);
    std::vector<Bf16> values(floats.size());
    std::transform(floats.begin(), floats.end(), values.begin(),
                   [](float x) { return contract::FloatToBf16(x); });
    return values;
  }

 private:
  static constexpr int64_t kPool = 1 << 20;
  float Special() {
    constexpr uint32_t kSpecials[] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc12345u,
                                      0x7f7f0000u, 0x00010000u, 0x80400000u, 0x80000000u};
    return contract::FromBits(kSpecials[random_() % std::size(kSpecials)]);
  }

  Random& random_;
  std::vector<std::vector<float>> floats_;
};

class RowKernelsTest : public testing::Test {
 protected:
  void SetUp() override {
    ISOBIT_SKIP_WITHOUT_GPU();
    cpu_ = MakeCpuOps({.num_threads = static_cast<int>(std::thread::hardware_concurrency())});
    ISOBIT_CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  void TearDown() override {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  int64_t Below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  bool Chance(int64_t one_in) { return Below(one_in) == 0; }
  // Bytes past a boundary: mostly none, else a few elements.
  size_t Offset(size_t element) { return Chance(4) ? element * static_cast<size_t>(Below(8)) : 0; }
  // A width of whole vectors, of a model, or any; at most `most`.
  int64_t Width(int64_t most) {
    constexpr int64_t kModels[] = {576,  1024, 2048, 2560,  3072,  3584, 4096,
                                   5120, 7168, 8192, 12288, 14336, 16384};
    const int64_t bound = int64_t{1} << (1 + Below(15));
    switch (Below(4)) {
      case 0:
        return std::min(most, kModels[random_() % std::size(kModels)]);
      case 1:
        return std::min(most, 1 + Below(bound));
      case 2:
        return 1 + Below(most);
      default:
        return std::min(most, 8 * (1 + Below(std::max<int64_t>(1, bound / 8))));
    }
  }
  // Rows of a matrix of about `elements` elements at most.
  int64_t Rows(int64_t width, int64_t elements) {
    const int64_t most = std::max<int64_t>(1, elements / width);
    return 1 + Below(Chance(2) ? std::min<int64_t>(most, 8) : most);
  }
  Stream AnyStream() { return {stream_, Chance(2)}; }

  Random random_{20};
  Operands operands_{random_};
  std::unique_ptr<Ops> cpu_;
  cudaStream_t stream_ = nullptr;
};

__global__ void CountUnequalSigmoids(int* unequal) {
  const auto bits = static_cast<Bf16>(blockIdx.x * blockDim.x + threadIdx.x);
  const float x = contract::Bf16ToFloat(bits);
  if (!(x >= kLeastModerateGate)) return;
  if (contract::BitsOf(SigmoidOfModerate(x)) != contract::BitsOf(contract::Sigmoid(x))) {
    atomicAdd(unequal, 1);
  }
}

TEST_F(RowKernelsTest, SigmoidOfEveryGate) {
  DeviceBuffer<int> unequal(std::vector<int>{0});
  CountUnequalSigmoids<<<256, 256>>>(unequal.data());
  ISOBIT_CHECK_CUDA(cudaGetLastError());
  EXPECT_EQ(unequal.CopyOut()[0], 0);
}

TEST_F(RowKernelsTest, SwiGluOfEveryGate) {
  constexpr int64_t kGates = 65536;
  constexpr int64_t kRows = 32;
  const std::vector<Bf16> ups = operands_.Bf16s(kRows, true);
  std::vector<Bf16> gate_up(2 * kGates * kRows);
  std::vector<Bf16> expected(kGates * kRows);
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t g = 0; g < kGates; ++g) {
      gate_up[2 * kGates * r + g] = static_cast<Bf16>(g);
      gate_up[2 * kGates * r + kGates + g] = ups[r];
      expected[kGates * r + g] = contract::SwiGlu(static_cast<Bf16>(g), ups[r]);
    }
  }
  DeviceBuffer<Bf16> in(gate_up);
  DeviceBuffer<Bf16> out(kGates * kRows);
  ASSERT_TRUE(
      LaunchSwiGlu({.gate_up = in.data(), .out = out.data(), .rows = kRows, .columns = kGates},
                   {stream_})
          .ok());
  EXPECT_TRUE(SameBits(View(out.CopyOut()), View(expected)));
}

TEST_F(RowKernelsTest, SwiGlu) {
  int cases = 0;
  for (; cases < Scaled(2000) && !HasFailure(); ++cases) {
    const bool large = cases % 500 == 499;
    const int64_t columns = Width(20000);
    const int64_t rows = large ? 5000000 / columns : Rows(columns, 60000);
    SCOPED_TRACE(absl::StrCat("case ", cases, ": ", rows, " x ", columns));
    const std::vector<Bf16> gate_up = operands_.Bf16s(rows * 2 * columns, Chance(4));
    std::vector<Bf16> expected(static_cast<size_t>(rows * columns));
    ASSERT_TRUE(cpu_->SwiGlu({.gate_up = gate_up.data(),
                              .out = expected.data(),
                              .rows = rows,
                              .columns = columns})
                    .ok());
    DeviceBuffer<Bf16> in(gate_up, Offset(sizeof(Bf16)));
    DeviceBuffer<Bf16> out(rows * columns, Offset(sizeof(Bf16)));
    ASSERT_TRUE(
        LaunchSwiGlu({.gate_up = in.data(), .out = out.data(), .rows = rows, .columns = columns},
                     AnyStream())
            .ok());
    EXPECT_TRUE(SameBits(View(out.CopyOut()), View(expected)));
    EXPECT_TRUE(out.GuardsIntact());
  }
  std::printf("SwiGlu: %d cases\n", cases);
}

TEST_F(RowKernelsTest, Embedding) {
  int cases = 0;
  for (; cases < Scaled(1000) && !HasFailure(); ++cases) {
    const int64_t hidden = Width(20000);
    const int64_t rows = Rows(hidden, 100000);
    const int64_t vocab = 1 + Below(20);
    SCOPED_TRACE(absl::StrCat("case ", cases, ": ", rows, " x ", hidden));
    const std::vector<Bf16> table = operands_.Bf16s(vocab * hidden, true);
    std::vector<int32_t> ids(static_cast<size_t>(rows));
    for (int32_t& id : ids) id = static_cast<int32_t>(Below(vocab));
    std::vector<Bf16> expected(static_cast<size_t>(rows * hidden));
    EmbeddingArgs args = {.ids = ids.data(),
                          .rows = rows,
                          .table = table.data(),
                          .hidden = hidden,
                          .out = expected.data()};
    ASSERT_TRUE(cpu_->Embedding(args).ok());
    DeviceBuffer<int32_t> device_ids(ids);
    DeviceBuffer<Bf16> device_table(table, Offset(sizeof(Bf16)));
    DeviceBuffer<Bf16> out(rows * hidden, Offset(sizeof(Bf16)));
    args.ids = device_ids.data();
    args.table = device_table.data();
    args.out = out.data();
    ASSERT_TRUE(LaunchEmbedding(args, AnyStream()).ok());
    EXPECT_TRUE(SameBits(View(out.CopyOut()), View(expected)));
    EXPECT_TRUE(out.GuardsIntact());
  }
  std::printf("Embedding: %d cases\n", cases);
}

TEST_F(RowKernelsTest, RmsNorm) {
  int cases = 0;
  int64_t rows_in_all = 0;
  for (; cases < Scaled(3000) && !HasFailure(); ++cases) {
    const bool large = cases % 500 == 499;
    const int64_t hidden = Width(20000);
    const int64_t rows = large ? 5000000 / hidden + 1 : Rows(hidden, 100000);
    const int64_t variant = Below(3);  // alone; after a sum; after a sum and a bias
    const bool specials = Chance(4);
    SCOPED_TRACE(absl::StrCat("case ", cases, ": ", rows, " x ", hidden, ", variant ", variant));
    const std::vector<Bf16> residual = operands_.Bf16s(rows * hidden, specials);
    const std::vector<float> sum = operands_.Floats(variant > 0 ? rows * hidden : 1, specials);
    const std::vector<float> bias = operands_.Floats(variant > 1 ? hidden : 1, false);
    const std::vector<Bf16> weight = operands_.Bf16s(hidden, false);
    std::vector<Bf16> expected_residual = residual;
    std::vector<Bf16> expected(residual.size());
    RmsNormArgs args = {.residual = expected_residual.data(),
                        .sum = variant > 0 ? sum.data() : nullptr,
                        .bias = variant > 1 ? bias.data() : nullptr,
                        .weight = weight.data(),
                        .out = expected.data(),
                        .rows = rows,
                        .hidden = hidden,
                        .eps = Chance(8) ? 0.0f : 1e-6f};
    ASSERT_TRUE(cpu_->RmsNorm(args).ok());

    DeviceBuffer<Bf16> device_residual(residual, Offset(sizeof(Bf16)));
    DeviceBuffer<float> device_sum(sum, Offset(sizeof(float)));
    DeviceBuffer<float> device_bias(bias, Offset(sizeof(float)));
    DeviceBuffer<Bf16> device_weight(weight, Offset(sizeof(Bf16)));
    DeviceBuffer<Bf16> out(rows * hidden, Offset(sizeof(Bf16)));
    args.residual = device_residual.data();
    args.sum = variant > 0 ? device_sum.data() : nullptr;
    args.bias = variant > 1 ? device_bias.data() : nullptr;
    args.weight = device_weight.data();
    args.out = out.data();
    for (int repeat = 0; repeat < (cases % 16 == 0 ? 3 : 1); ++repeat) {
      device_residual.CopyIn(residual);
      out.Poison();
      ASSERT_TRUE(LaunchRmsNorm(args, AnyStream()).ok());
      EXPECT_TRUE(SameBits(View(out.CopyOut()), View(expected)));
      EXPECT_TRUE(SameBits(View(device_residual.CopyOut()), View(expected_residual)));
    }
    EXPECT_TRUE(out.GuardsIntact() && device_residual.GuardsIntact());
    rows_in_all += rows;
  }
  std::printf("RmsNorm: %d cases, %lld rows\n", cases, static_cast<long long>(rows_in_all));
}

// A row's sum reaches the output through two roundings to bf16, which hide most of a last bit.
// Enough rows show it all the same: the control adds the leaves from left to right.
TEST_F(RowKernelsTest, AWrongOrderOfRmsNormsSumShows) {
  constexpr int64_t kRows = 6000;
  constexpr int64_t kHidden = 1024;
  const std::vector<Bf16> x =
      testing_support::RandomBf16(Family::kNormal, kRows * kHidden, random_);
  const std::vector<Bf16> weight(kHidden, contract::FloatToBf16(1.0f));
  int64_t unequal = 0;
  DeviceBuffer<Bf16> residual(x);
  DeviceBuffer<Bf16> device_weight(weight);
  DeviceBuffer<Bf16> out(kRows * kHidden);
  ASSERT_TRUE(LaunchRmsNorm({.residual = residual.data(),
                             .weight = device_weight.data(),
                             .out = out.data(),
                             .rows = kRows,
                             .hidden = kHidden,
                             .eps = 1e-6f},
                            {stream_})
                  .ok());
  const std::vector<Bf16> actual = out.CopyOut();
  for (int64_t r = 0; r < kRows; ++r) {
    const Bf16* row = x.data() + r * kHidden;
    float chain = 0.0f;
    for (int64_t i = 0; i < kHidden; i += contract::kNormLeaf) {
      chain = contract::Add(chain, contract::SumOfSquares(row + i, contract::kNormLeaf));
    }
    const float right = contract::InverseRms(contract::SumOfSquares(row, kHidden), kHidden, 1e-6f);
    const float wrong = contract::InverseRms(chain, kHidden, 1e-6f);
    for (int64_t i = 0; i < kHidden; ++i) {
      const Bf16 y = actual[static_cast<size_t>(r * kHidden + i)];
      ASSERT_EQ(y, contract::Normalise(row[i], right, weight[0]));
      unequal += y != contract::Normalise(row[i], wrong, weight[0]) ? 1 : 0;
    }
  }
  EXPECT_GT(unequal, 0);
  std::printf("a chain instead of the tree: %lld elements differ\n",
              static_cast<long long>(unequal));
}

// NaN is equal to NaN: the contract promises no payloads here.
testing::AssertionResult SameSums(std::vector<float> actual, std::vector<float> expected) {
  for (std::vector<float>* values : {&actual, &expected}) {
    for (float& x : *values) x = x != x ? contract::FromBits(0x7fffffffu) : x;
  }
  return SameBits(View(actual), View(expected));
}

TEST_F(RowKernelsTest, Reduce) {
  constexpr NumericsMode kModes[] = {NumericsMode::kTree, NumericsMode::kBatchInvariant,
                                     NumericsMode::kVanilla};
  int cases = 0;
  int ring_differs = 0;
  for (; cases < Scaled(2000) && !HasFailure(); ++cases) {
    const int ranks = 1 << Below(4);
    const NumericsMode mode = kModes[Below(3)];
    const int64_t count = 1 + Below(cases % 400 == 399 ? 2000000 : int64_t{1} << (1 + Below(16)));
    int64_t begin = Chance(2) ? 0 : Below(count);
    if (Chance(2)) begin = begin / 4 * 4;
    const int64_t end = Chance(2) ? count : begin + Below(count - begin + 1);
    SCOPED_TRACE(absl::StrCat("case ", cases, ": [", begin, ", ", end, ") of ", count, ", ", ranks,
                              " ranks, mode ", static_cast<int>(mode)));
    const bool specials = Chance(4);
    std::vector<std::vector<float>> partials;
    std::vector<std::unique_ptr<DeviceBuffer<float>>> buffers;
    std::vector<const float*> host;
    std::vector<const float*> device;
    for (int r = 0; r < ranks; ++r) {
      partials.push_back(operands_.Floats(count, specials));
      buffers.push_back(std::make_unique<DeviceBuffer<float>>(
          partials.back(), Chance(8) ? Offset(sizeof(float)) : 0));
      device.push_back(buffers.back()->data());
    }
    for (const std::vector<float>& partial : partials) host.push_back(partial.data());
    DeviceBuffer<float> out(count, Chance(4) ? Offset(sizeof(float)) : 0);
    std::vector<float> expected = out.CopyOut();
    ReduceArgs args = {.partials = host.data(),
                       .num_ranks = ranks,
                       .begin = begin,
                       .end = end,
                       .count = count,
                       .out = expected.data(),
                       .mode = mode};
    ASSERT_TRUE(cpu_->Reduce(args).ok());
    if (mode == NumericsMode::kVanilla && ranks > 1) {
      std::vector<float> other(expected.size());
      ReduceArgs from_first = args;
      from_first.out = other.data();
      from_first.mode = NumericsMode::kBatchInvariant;
      ASSERT_TRUE(cpu_->Reduce(from_first).ok());
      ring_differs +=
          std::equal(expected.begin() + begin, expected.begin() + end, other.begin() + begin) ? 0
                                                                                              : 1;
    }
    args.partials = device.data();
    args.out = out.data();
    ASSERT_TRUE(LaunchReduce(args, AnyStream()).ok());
    EXPECT_TRUE(SameSums(out.CopyOut(), expected));
    EXPECT_TRUE(out.GuardsIntact());
  }
  EXPECT_GT(100 * ring_differs, cases);
  std::printf("Reduce: %d cases, in %d the ring's order differs from rank order\n", cases,
              ring_differs);
}

TEST_F(RowKernelsTest, ReduceRefusesThreeRanks) {
  const float* partials[3] = {};
  EXPECT_EQ(LaunchReduce({.partials = partials, .num_ranks = 3}, {stream_}).code(),
            absl::StatusCode::kInvalidArgument);
}

// Sequences as the launchers read them, and their copy on the GPU.
struct SequenceCase {
  std::vector<SequenceRows> host;
  std::vector<std::vector<int32_t>> pages_of;
  std::vector<int32_t> first_row, first_position, first_page, pages, sequence_of_row;
  std::vector<std::unique_ptr<DeviceBuffer<int32_t>>> buffers;
  DeviceSequences device;

  void Upload() {
    const auto put = [this](const std::vector<int32_t>& values) {
      buffers.push_back(std::make_unique<DeviceBuffer<int32_t>>(values));
      return buffers.back()->data();
    };
    device.first_row = put(first_row);
    device.first_position = put(first_position);
    device.first_page = put(first_page);
    device.pages = put(pages);
    device.sequence_of_row = put(sequence_of_row);
    device.num_sequences = static_cast<int32_t>(first_position.size());
    device.num_rows = static_cast<int32_t>(sequence_of_row.size());
  }
};

class QkvTest : public RowKernelsTest {
 protected:
  static constexpr int64_t kPositions = 700;

  // Decode tokens and prompts in pages of their own, in random order; `padding` rows at the end.
  SequenceCase AnySequences(int32_t page_size, int64_t most_rows, int64_t padding,
                            int32_t* num_pages) {
    SequenceCase c;
    const int64_t count = 1 + Below(6);
    *num_pages = 0;
    int32_t rows = 0;
    for (int64_t s = 0; s < count; ++s) {
      const int32_t n = static_cast<int32_t>(Chance(2) ? 1 : 1 + Below(most_rows));
      const int32_t position = static_cast<int32_t>(Chance(3) ? 0 : Below(kPositions - n));
      c.first_row.push_back(rows);
      c.first_position.push_back(position);
      c.first_page.push_back(static_cast<int32_t>(c.pages.size()));
      c.sequence_of_row.insert(c.sequence_of_row.end(), static_cast<size_t>(n),
                               static_cast<int32_t>(s));
      const int32_t used = (position + n + page_size - 1) / page_size;
      for (int32_t p = 0; p < used; ++p) c.pages.push_back((*num_pages)++);
      c.host.push_back({.first_row = rows, .num_rows = n, .first_position = position});
      rows += n;
    }
    c.first_row.push_back(rows);
    std::shuffle(c.pages.begin(), c.pages.end(), random_);
    for (int64_t s = 0; s < count; ++s) {
      c.host[static_cast<size_t>(s)].pages = c.pages.data() + c.first_page[static_cast<size_t>(s)];
    }
    c.sequence_of_row.insert(c.sequence_of_row.end(), static_cast<size_t>(padding), -1);
    c.Upload();
    return c;
  }
};

TEST_F(QkvTest, Qkv) {
  constexpr int32_t kHeadDims[] = {16, 32, 64, 80, 96, 128, 128, 192, 256};
  int cases = 0;
  int poisoned = 0;
  for (; cases < Scaled(2500) && !HasFailure(); ++cases) {
    const bool large = cases % 500 == 499;
    const int32_t d = Chance(5) ? static_cast<int32_t>(2 + 2 * Below(160))
                                : kHeadDims[random_() % std::size(kHeadDims)];
    const int32_t kv_heads = static_cast<int32_t>(1 + Below(large ? 8 : 4));
    const int32_t heads = kv_heads * static_cast<int32_t>(1 + Below(8));
    const int32_t page_size = Chance(3) ? static_cast<int32_t>(1 + Below(40)) : 16 << Below(4);
    const int64_t padding = Chance(3) ? Below(5) : 0;
    const int64_t columns = int64_t{heads + 2 * kv_heads} * d;
    const int64_t ld = columns + (Chance(2) ? 0 : Chance(2) ? 8 * Below(4) : Below(20));
    int32_t num_pages = 0;
    const SequenceCase sequences =
        AnySequences(page_size, std::min(kPositions / 2, large ? kPositions : 1 + 40000 / columns),
                     padding, &num_pages);
    const int64_t rows = sequences.device.num_rows;
    SCOPED_TRACE(absl::StrCat("case ", cases, ": ", rows, " rows, ", heads, "+", kv_heads,
                              " heads of ", d, ", page ", page_size, ", ld ", ld));

    const bool specials = Chance(2);
    const bool q_normed = Chance(2);
    const bool k_normed = Chance(8) ? !q_normed : q_normed;
    const std::vector<Bf16> qkv = operands_.Bf16s(rows * ld, specials);
    const std::vector<Bf16> q_norm = operands_.Bf16s(d, false);
    const std::vector<Bf16> k_norm = operands_.Bf16s(d, false);
    const std::vector<float> cosine = operands_.Floats(kPositions * d / 2, false);
    const std::vector<float> sine = operands_.Floats(kPositions * d / 2, false);
    const int64_t cache = int64_t{num_pages} * kv_heads * page_size * d;

    DeviceBuffer<Bf16> device_qkv(qkv, Offset(sizeof(Bf16)));
    DeviceBuffer<Bf16> device_q_norm(q_norm, Offset(sizeof(Bf16)));
    DeviceBuffer<Bf16> device_k_norm(k_norm, Offset(sizeof(Bf16)));
    DeviceBuffer<float> device_cosine(cosine, Chance(4) ? Offset(sizeof(float)) : 0);
    DeviceBuffer<float> device_sine(sine, Chance(4) ? Offset(sizeof(float)) : 0);
    DeviceBuffer<Bf16> k(cache, Offset(sizeof(Bf16)));
    DeviceBuffer<Bf16> v(cache, Offset(sizeof(Bf16)));
    std::vector<Bf16> expected = qkv;
    std::vector<Bf16> expected_k = k.CopyOut();
    std::vector<Bf16> expected_v = v.CopyOut();
    QkvArgs args = {.qkv = expected.data(),
                    .ld = ld,
                    .heads = heads,
                    .q_norm = q_normed ? q_norm.data() : nullptr,
                    .k_norm = k_normed ? k_norm.data() : nullptr,
                    .eps = 1e-6f,
                    .cosine = cosine.data(),
                    .sine = sine.data(),
                    .sequences = {.host = sequences.host},
                    .kv = {.k = expected_k.data(),
                           .v = expected_v.data(),
                           .page_size = page_size,
                           .kv_heads = kv_heads,
                           .head_dim = d}};
    ASSERT_TRUE(cpu_->Qkv(args).ok());
    poisoned += std::count(expected_k.begin(), expected_k.end(), contract::kPoisonedKey) >= d;
    // The GPU leaves k, v and what lies between rows as they are.
    for (int64_t r = 0; r < rows; ++r) {
      std::copy(qkv.begin() + r * ld + int64_t{heads} * d, qkv.begin() + (r + 1) * ld,
                expected.begin() + r * ld + int64_t{heads} * d);
    }

    args.qkv = device_qkv.data();
    args.q_norm = q_normed ? device_q_norm.data() : nullptr;
    args.k_norm = k_normed ? device_k_norm.data() : nullptr;
    args.cosine = device_cosine.data();
    args.sine = device_sine.data();
    args.sequences = {.host = {}, .device = &sequences.device};
    args.kv.k = k.data();
    args.kv.v = v.data();
    for (int repeat = 0; repeat < (cases % 16 == 0 ? 3 : 1); ++repeat) {
      device_qkv.CopyIn(qkv);
      k.Poison();
      v.Poison();
      ASSERT_TRUE(LaunchQkv(args, AnyStream()).ok());
      EXPECT_TRUE(SameBits(View(device_qkv.CopyOut()), View(expected))) << "q";
      EXPECT_TRUE(SameBits(View(k.CopyOut()), View(expected_k))) << "k";
      EXPECT_TRUE(SameBits(View(v.CopyOut()), View(expected_v))) << "v";
    }
    EXPECT_TRUE(device_qkv.GuardsIntact() && k.GuardsIntact() && v.GuardsIntact());
  }
  EXPECT_GT(50 * poisoned, cases);
  std::printf("Qkv: %d cases, %d with a poisoned head\n", cases, poisoned);
}

// A layer's row-wise ops in a chain, each launched as a dependent of the one before.
class ChainTest : public QkvTest {
 protected:
  static constexpr int64_t kRows = 70;
  static constexpr int32_t kHeads = 8;
  static constexpr int32_t kHeadDim = 128;
  static constexpr int64_t kHidden = (kHeads + 4) * kHeadDim;  // a qkv row of two KV heads
  static constexpr int32_t kPage = 32;

  // One stream's buffers.
  struct Chain {
    Chain(const std::vector<int32_t>& id_values, const std::vector<Bf16>& table_values,
          const std::vector<float>& partial_values, const std::vector<Bf16>& weight_values)
        : ids(id_values), table(table_values), partials(partial_values), weight(weight_values) {}
    DeviceBuffer<int32_t> ids;
    DeviceBuffer<Bf16> table;
    DeviceBuffer<float> partials;  // [2][kRows, kHidden]
    DeviceBuffer<Bf16> weight;
    DeviceBuffer<float> sum{kRows * kHidden};
    DeviceBuffer<Bf16> residual{kRows * kHidden};
    DeviceBuffer<Bf16> normed{kRows * kHidden};
    DeviceBuffer<Bf16> k{kRows * 2 * kPage * kHeadDim};
    DeviceBuffer<Bf16> v{kRows * 2 * kPage * kHeadDim};
    DeviceBuffer<Bf16> out{kRows * kHidden / 2};
  };

  struct Pointers {
    const int32_t* ids;
    const Bf16* table;
    const float* partials[2];
    const Bf16* weight;
    float* sum;
    Bf16* residual;
    Bf16* normed;
    Bf16* k;
    Bf16* v;
    Bf16* out;
  };

  // Embedding, a sum of partials, RMSNorm, q and k on the normed rows, SwiGLU of what results.
  template <typename Embedding, typename Reduce, typename RmsNorm, typename Qkv, typename SwiGlu>
  static void RunChain(const Pointers& p, const float* tables, const SequenceTable& sequences,
                       const Embedding& embedding, const Reduce& reduce, const RmsNorm& rms_norm,
                       const Qkv& qkv, const SwiGlu& swiglu) {
    EXPECT_TRUE(embedding(EmbeddingArgs{.ids = p.ids,
                                        .rows = kRows,
                                        .table = p.table,
                                        .hidden = kHidden,
                                        .out = p.residual})
                    .ok());
    EXPECT_TRUE(reduce(ReduceArgs{.partials = p.partials,
                                  .num_ranks = 2,
                                  .begin = 0,
                                  .end = kRows * kHidden,
                                  .count = kRows * kHidden,
                                  .out = p.sum})
                    .ok());
    EXPECT_TRUE(rms_norm(RmsNormArgs{.residual = p.residual,
                                     .sum = p.sum,
                                     .weight = p.weight,
                                     .out = p.normed,
                                     .rows = kRows,
                                     .hidden = kHidden,
                                     .eps = 1e-6f})
                    .ok());
    EXPECT_TRUE(qkv(QkvArgs{.qkv = p.normed,
                            .ld = kHidden,
                            .heads = kHeads,
                            .q_norm = p.weight,
                            .k_norm = p.weight,
                            .eps = 1e-6f,
                            .cosine = tables,
                            .sine = tables + kPositions * kHeadDim / 2,
                            .sequences = sequences,
                            .kv = {.k = p.k,
                                   .v = p.v,
                                   .page_size = kPage,
                                   .kv_heads = 2,
                                   .head_dim = kHeadDim}})
                    .ok());
    // Of two rows' q heads: the CPU leaves other k heads between them.
    for (int64_t r = 0; r < kRows; r += kRows - 1) {
      EXPECT_TRUE(swiglu(SwiGluArgs{.gate_up = p.normed + r * kHidden,
                                    .out = p.out + r * kHidden / 2,
                                    .rows = 1,
                                    .columns = kHeads * kHeadDim / 2})
                      .ok());
    }
  }
};

TEST_F(ChainTest, DependentLaunchesStreamsAndReplays) {
  constexpr int kChains = 3;
  SequenceCase sequences;  // kRows decode tokens, a page each
  sequences.first_row.resize(kRows + 1);
  std::iota(sequences.first_row.begin(), sequences.first_row.end(), 0);
  sequences.sequence_of_row.resize(kRows);
  std::iota(sequences.sequence_of_row.begin(), sequences.sequence_of_row.end(), 0);
  sequences.pages = sequences.first_page = sequences.sequence_of_row;
  for (int64_t r = 0; r < kRows; ++r) {
    sequences.first_position.push_back(static_cast<int32_t>(Below(kPage)));
    sequences.host.push_back({.first_row = r,
                              .num_rows = 1,
                              .first_position = sequences.first_position.back(),
                              .pages = sequences.pages.data() + r});
  }
  sequences.Upload();
  const std::vector<float> tables = operands_.Floats(kPositions * kHeadDim, false);
  DeviceBuffer<float> device_tables(tables);

  for (int trial = 0; trial < Scaled(20); ++trial) {
    std::vector<std::unique_ptr<Chain>> chains;
    std::vector<std::vector<Bf16>> expected;
    std::vector<cudaStream_t> streams(kChains);
    for (int c = 0; c < kChains; ++c) {
      ISOBIT_CHECK_CUDA(cudaStreamCreateWithFlags(&streams[c], cudaStreamNonBlocking));
      std::vector<int32_t> ids(kRows);
      for (int32_t& id : ids) id = static_cast<int32_t>(Below(10));
      const std::vector<Bf16> table = operands_.Bf16s(10 * kHidden, false);
      const std::vector<float> partials = operands_.Floats(2 * kRows * kHidden, false);
      const std::vector<Bf16> weight = operands_.Bf16s(kHidden, false);
      std::vector<float> sum(kRows * kHidden);
      std::vector<Bf16> residual(kRows * kHidden), normed(kRows * kHidden);
      std::vector<Bf16> k(kRows * 2 * kPage * kHeadDim, 0xffff), v = k;
      std::vector<Bf16> out(kRows * kHidden / 2, 0xffff);
      RunChain(
          {ids.data(),
           table.data(),
           {partials.data(), partials.data() + kRows * kHidden},
           weight.data(),
           sum.data(),
           residual.data(),
           normed.data(),
           k.data(),
           v.data(),
           out.data()},
          tables.data(), {.host = sequences.host},
          [&](const EmbeddingArgs& a) { return cpu_->Embedding(a); },
          [&](const ReduceArgs& a) { return cpu_->Reduce(a); },
          [&](const RmsNormArgs& a) { return cpu_->RmsNorm(a); },
          [&](const QkvArgs& a) { return cpu_->Qkv(a); },
          [&](const SwiGluArgs& a) { return cpu_->SwiGlu(a); });
      expected.insert(expected.end(), {residual, k, v, out});
      chains.push_back(std::make_unique<Chain>(ids, table, partials, weight));
    }
    // At first launched, on all streams at once, then captured and replayed.
    const auto launch = [&](int c) {
      Chain& b = *chains[c];
      const Stream stream = {streams[c], trial % 2 == 0};
      RunChain(
          {b.ids.data(),
           b.table.data(),
           {b.partials.data(), b.partials.data() + kRows * kHidden},
           b.weight.data(),
           b.sum.data(),
           b.residual.data(),
           b.normed.data(),
           b.k.data(),
           b.v.data(),
           b.out.data()},
          device_tables.data(), {.host = {}, .device = &sequences.device},
          [&](const EmbeddingArgs& a) { return LaunchEmbedding(a, stream); },
          [&](const ReduceArgs& a) { return LaunchReduce(a, stream); },
          [&](const RmsNormArgs& a) { return LaunchRmsNorm(a, stream); },
          [&](const QkvArgs& a) { return LaunchQkv(a, stream); },
          [&](const SwiGluArgs& a) { return LaunchSwiGlu(a, stream); });
    };
    const auto poison = [](Chain& b) {
      for (DeviceBuffer<Bf16>* buffer : {&b.residual, &b.normed, &b.k, &b.v, &b.out}) {
        buffer->Poison();
      }
      b.sum.Poison();
    };
    const auto check = [&](int c) {
      Chain& b = *chains[c];
      DeviceBuffer<Bf16>* buffers[] = {&b.residual, &b.k, &b.v, &b.out};
      for (size_t i = 0; i < std::size(buffers); ++i) {
        EXPECT_TRUE(
            SameBits(View(buffers[i]->CopyOut()), View(expected[static_cast<size_t>(c) * 4 + i])))
            << "trial " << trial << ", stream " << c << ", buffer " << i;
      }
    };
    for (int c = 0; c < kChains; ++c) launch(c);
    for (int c = 0; c < kChains; ++c) check(c);
    std::vector<cudaGraphExec_t> graphs(kChains);
    for (int c = 0; c < kChains; ++c) {
      cudaGraph_t graph;
      ISOBIT_CHECK_CUDA(cudaStreamBeginCapture(streams[c], cudaStreamCaptureModeThreadLocal));
      launch(c);
      ISOBIT_CHECK_CUDA(cudaStreamEndCapture(streams[c], &graph));
      ISOBIT_CHECK_CUDA(cudaGraphInstantiate(&graphs[c], graph, 0));
      ISOBIT_CHECK_CUDA(cudaGraphDestroy(graph));
    }
    for (int replay = 0; replay < 5; ++replay) {
      for (int c = 0; c < kChains; ++c) poison(*chains[c]);
      for (int c = 0; c < kChains; ++c) {
        for (int again = 0; again < 3; ++again) {
          ISOBIT_CHECK_CUDA(cudaGraphLaunch(graphs[c], streams[c]));
        }
      }
      for (int c = 0; c < kChains; ++c) check(c);
    }
    for (int c = 0; c < kChains; ++c) {
      ISOBIT_CHECK_CUDA(cudaGraphExecDestroy(graphs[c]));
      ISOBIT_CHECK_CUDA(cudaStreamDestroy(streams[c]));
    }
  }
}

}  // namespace
}  // namespace isobit::cuda
