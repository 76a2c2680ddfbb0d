// The gradients of linear layers on a GPU against the CPU, bit for bit: every schedule, random
// shapes, parts, packs and alignments.
#include <array>
#include <cstring>
#include <optional>
#include <span>

#include "absl/strings/str_format.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/sm90/linear/input_gradient.h"
#include "kernels/cuda/sm90/linear/weight_gradient.h"
#include "kernels/oracle/oracle_backend.h"
#include "tests/kernels/cuda/linear/product_case.h"

namespace isobit::cuda {
namespace {

using testing_support::Below;
using testing_support::DeviceBuffer;
using testing_support::Family;
using testing_support::HostMatrix;
using testing_support::kFamilies;
using testing_support::List;
using testing_support::OneChain;
using testing_support::OnH200;
using testing_support::Random;
using testing_support::RandomLd;
using testing_support::RandomMatrix;
using testing_support::RandomPacks;
using testing_support::RandomParts;
using testing_support::SameBits;
using testing_support::Scaled;
using testing_support::Transposed;
using testing_support::TreeOfSums;

template <typename T>
std::span<const T> View(const std::vector<T>& v) {
  return v;
}

template <typename T>
int64_t Unequal(const std::vector<T>& a, const std::vector<T>& b) {
  int64_t unequal = 0;
  for (size_t i = 0; i < a.size(); ++i) unequal += std::memcmp(&a[i], &b[i], sizeof(T)) != 0;
  return unequal;
}

std::vector<Bf16> Rounded(const std::vector<float>& values) {
  std::vector<Bf16> out;
  for (const float value : values) out.push_back(contract::FloatToBf16(value));
  return out;
}

// Every tile that a kernel exists for; nullopt is the slow kernel.
std::vector<std::optional<ProductSchedule>> Schedules(std::span<const ProductSchedule> tiles) {
  std::vector<std::optional<ProductSchedule>> all = {std::nullopt};
  for (const ProductSchedule& tile : tiles) {
    if (tile.cluster > 1 && std::getenv("ISOBIT_TEST_WITHOUT_CLUSTERS") != nullptr) continue;
    all.emplace_back(tile);
  }
  return all;
}
std::string Describe(const std::optional<ProductSchedule>& schedule) {
  if (!schedule.has_value()) return "slow kernel";
  return absl::StrFormat("%d columns, cluster %d, split %d", schedule->columns, schedule->cluster,
                         schedule->split);
}

// ---- Input gradient

struct InputCase {
  std::vector<int64_t> parts;  // rows of the weight
  HostMatrix dy;               // [m, n]
  HostMatrix weight;           // [n, columns]
  size_t offset = 0;           // bytes past an aligned address, of dx

  std::string Description() const {
    return absl::StrFormat("m %d, parts %s, columns %d, lddy %d, offset %d", dy.rows, List(parts),
                           weight.columns, dy.ld, offset);
  }
};

std::vector<float> ExactInputGradient(const InputCase& c) {
  HostMatrix dy = c.dy;
  std::vector<Bf16> dense;
  for (int64_t r = 0; r < dy.rows; ++r) {
    for (int64_t i = 0; i < dy.columns; ++i) dense.push_back(dy.at(r, i));
  }
  return OneChain(dense, Transposed(c.weight, 0, c.weight.rows), dy.rows, c.weight.columns,
                  c.weight.rows);
}

InputGradientArgs ArgsOf(const InputCase& c, const Bf16* dy, const Bf16* weight, Bf16* dx) {
  InputGradientArgs args;
  args.dy = dy;
  args.lddy = c.dy.ld;
  args.m = c.dy.rows;
  args.weight.parts = static_cast<int>(c.parts.size());
  args.weight.columns = c.weight.columns;
  for (size_t i = 0; i < c.parts.size(); ++i) {
    args.weight.data[i] = weight;
    args.weight.rows[i] = c.parts[i];
    weight += c.parts[i] * c.weight.columns;
  }
  args.dx = dx;
  return args;
}

InputCase RandomInputCase(Random& random) {
  const bool mappable = Below(4, random) != 0;
  constexpr int64_t kUnits[] = {64, 16, 1};
  InputCase c;
  c.parts = RandomParts(1 + Below(900, random), kUnits[Below(3, random)], random);
  int64_t n = 0;
  for (const int64_t rows : c.parts) n += rows;
  const int64_t m = 1 + Below(400, random);
  const int64_t columns = mappable ? 8 * (1 + Below(70, random)) : 1 + Below(300, random);
  const Family family = kFamilies[Below(std::size(kFamilies), random)];
  c.dy = RandomMatrix(family, m, n, RandomLd(n, mappable, random), random);
  c.weight = RandomMatrix(family, n, columns, columns, random);
  c.offset = mappable ? 0 : 2 * static_cast<size_t>(Below(3, random));
  return c;
}

void ExpectInputGradient(const InputCase& c) {
  const std::vector<Bf16> expected = Rounded(ExactInputGradient(c));
  DeviceBuffer<Bf16> dy(c.dy.values);
  DeviceBuffer<Bf16> weight(c.weight.values);
  DeviceBuffer<Bf16> dx(static_cast<int64_t>(expected.size()), c.offset);
  const InputGradientArgs args = ArgsOf(c, dy.data(), weight.data(), dx.data());
  const auto expect = [&](const std::string& how, const absl::Status& status) {
    SCOPED_TRACE(absl::StrCat(how, ": ", c.Description()));
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_TRUE(SameBits(View(dx.CopyOut()), View(expected)));
    ASSERT_TRUE(dx.GuardsIntact());
    dx.Poison();
  };
  int fast = 0;
  for (const auto& schedule : Schedules(kInputGradientTiles)) {
    if (!schedule.has_value()) {
      expect("slow kernel", LaunchGeneralInputGradient(args, {}));
      continue;
    }
    const absl::Status status = LaunchInputGradientAs(*schedule, args, OnH200());
    if (absl::IsInvalidArgument(status)) continue;
    ++fast;
    expect(Describe(schedule), status);
    if (testing::Test::HasFatalFailure()) return;
  }
  EXPECT_EQ(fast > 0, HasInputGradientTiles(args));
  expect("chosen", cuda::Run(args, OnH200()));
}

using GradientTest = testing_support::GpuTest;

TEST_F(GradientTest, InputGradients) {
  Random random(1);
  for (int i = 0; i < Scaled(150) && !HasFatalFailure(); ++i) {
    ExpectInputGradient(RandomInputCase(random));
  }
}

// More tiles than run at once, and a ring that wraps around.
TEST_F(GradientTest, InputGradientsLargerThanAWave) {
  Random random(2);
  for (const auto& [m, n, columns] : std::vector<std::array<int64_t, 3>>{
           {2100, 576, 2304}, {5000, 320, 1000}, {1290, 1536, 3080}}) {
    InputCase c = {.parts = {n / 2 / 64 * 64, n - n / 2 / 64 * 64}};
    c.dy = RandomMatrix(Family::kNormal, m, n, n, random);
    c.weight = RandomMatrix(Family::kNormal, n, columns, columns, random);
    ExpectInputGradient(c);
    if (HasFatalFailure()) return;
  }
}

// ---- Weight gradient

struct WeightCase {
  std::vector<int64_t> parts;
  std::vector<int64_t> packs;
  HostMatrix dy;  // [rows, n]; more rows than the packs have
  HostMatrix x;   // [rows, columns]
  size_t offset = 0;
  std::vector<float> start = {};  // what dw holds, if the chain goes on from it

  std::string Description() const {
    return absl::StrFormat("packs %s, parts %s, columns %d, ld %d and %d, offset %d%s", List(packs),
                           List(parts), x.columns, dy.ld, x.ld, offset,
                           start.empty() ? "" : ", continues");
  }
};

std::vector<float> PackSum(const WeightCase& c, int64_t begin, int64_t end) {
  return OneChain(Transposed(c.dy, begin, end), Transposed(c.x, begin, end), c.dy.columns,
                  c.x.columns, end - begin);
}
std::vector<float> ExactWeightGradient(const WeightCase& c) {
  std::vector<std::vector<float>> sums;
  for (size_t i = 0; i + 1 < c.packs.size(); ++i) {
    sums.push_back(PackSum(c, c.packs[i], c.packs[i + 1]));
  }
  return TreeOfSums(std::move(sums));
}

WeightGradientArgs ArgsOf(const WeightCase& c, const Bf16* dy, const Bf16* x, float* dw) {
  WeightGradientArgs args;
  args.dy = dy;
  args.lddy = c.dy.ld;
  args.x = x;
  args.ldx = c.x.ld;
  args.packs = c.packs;
  args.parts = static_cast<int>(c.parts.size());
  args.columns = c.x.columns;
  for (size_t i = 0; i < c.parts.size(); ++i) {
    args.part_rows[i] = c.parts[i];
    args.dw[i] = dw;
    dw += c.parts[i] * c.x.columns;
  }
  args.continues = !c.start.empty();
  return args;
}

WeightCase RandomWeightCase(int packs, Random& random) {
  const bool mappable = Below(5, random) != 0;
  constexpr int64_t kUnits[] = {64, 8, 1};
  WeightCase c;
  c.parts = RandomParts(1 + Below(500, random), kUnits[Below(3, random)], random);
  int64_t n = 0;
  for (const int64_t rows : c.parts) n += rows;
  const int64_t rows = Below(20, random) == 0 ? 0 : 1 + Below(1500, random);
  const int64_t columns = mappable ? 4 * (1 + Below(120, random)) : 1 + Below(300, random);
  c.packs = RandomPacks(packs, rows, random);
  const Family family = kFamilies[Below(std::size(kFamilies), random)];
  c.dy = RandomMatrix(family, rows + 70, n, RandomLd(n, mappable, random), random);
  c.x = RandomMatrix(family, rows + 70, columns, RandomLd(columns, mappable, random), random);
  // Nothing may depend on rows beyond the packs.
  std::fill(c.dy.values.begin() + rows * c.dy.ld, c.dy.values.end(), Bf16{0x7fc0});
  std::fill(c.x.values.begin() + rows * c.x.ld, c.x.values.end(), Bf16{0x7fc0});
  c.offset = mappable ? 0 : 4 * static_cast<size_t>(Below(3, random));
  return c;
}

void ExpectWeightGradient(const WeightCase& c, const std::vector<float>& expected) {
  DeviceBuffer<Bf16> dy(c.dy.values);
  DeviceBuffer<Bf16> x(c.x.values);
  DeviceBuffer<float> dw(static_cast<int64_t>(expected.size()), c.offset);
  if (!c.start.empty()) dw.CopyIn(c.start);
  const WeightGradientArgs args = ArgsOf(c, dy.data(), x.data(), dw.data());
  const int packs = static_cast<int>(c.packs.size()) - 1;
  const auto expect = [&](const std::string& how, size_t workspace_bytes, auto launch) {
    SCOPED_TRACE(absl::StrCat(how, ": ", c.Description()));
    DeviceBuffer<std::byte> workspace(static_cast<int64_t>(workspace_bytes));
    const absl::Status status = launch(workspace.data());
    if (absl::IsInvalidArgument(status)) return false;
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(SameBits(View(dw.CopyOut()), View(expected)));
    EXPECT_TRUE(dw.GuardsIntact() && workspace.GuardsIntact());
    dw.Poison();
    if (!c.start.empty()) dw.CopyIn(c.start);
    return true;
  };
  int fast = 0;
  for (const auto& schedule : Schedules(kWeightGradientTiles)) {
    if (!schedule.has_value()) {
      expect("slow kernel", 0, [&](std::byte*) { return LaunchGeneralWeightGradient(args, {}); });
      continue;
    }
    for (int split = 1; split <= packs; split *= 2) {
      ProductSchedule with_split = *schedule;
      with_split.split = split;
      fast += expect(Describe(with_split), WorkspaceBytesAs(kH200, with_split, args),
                     [&](std::byte* workspace) {
                       return LaunchWeightGradientAs(with_split, args, workspace, OnH200());
                     });
    }
  }
  EXPECT_EQ(fast > 0, HasWeightGradientTiles(args));
  const testing_support::Workspace workspace;
  EXPECT_TRUE(
      expect("chosen", 0, [&](std::byte*) { return cuda::Run(args, workspace.On(OnH200())); }));
  EXPECT_TRUE(workspace.GuardsIntact());
}

TEST_F(GradientTest, WeightGradients) {
  Random random(3);
  for (int i = 0; i < Scaled(120) && !HasFailure(); ++i) {
    const WeightCase c =
        RandomWeightCase(1 << Below(Below(4, random) == 0 ? 7 : 4, random), random);
    ExpectWeightGradient(c, ExactWeightGradient(c));
  }
}

// A pack in two calls, of which the first has a multiple of 16 rows, has the bits of one call.
TEST_F(GradientTest, WeightGradientsContinue) {
  Random random(4);
  for (int i = 0; i < Scaled(30) && !HasFailure(); ++i) {
    WeightCase c = RandomWeightCase(1, random);
    const std::vector<float> whole = ExactWeightGradient(c);
    const int64_t first = c.packs[1] / 16 * 16 / 2 / 16 * 16;
    c.start = PackSum(c, 0, first);
    c.dy.values.erase(c.dy.values.begin(), c.dy.values.begin() + first * c.dy.ld);
    c.x.values.erase(c.x.values.begin(), c.x.values.begin() + first * c.x.ld);
    c.packs[1] -= first;
    ExpectWeightGradient(c, whole);
  }
}

TEST_F(GradientTest, WeightGradientsLargerThanAWave) {
  Random random(5);
  for (const auto& [rows, n, columns] :
       std::vector<std::array<int64_t, 3>>{{1100, 2100, 2304}, {700, 5000, 1000}}) {
    WeightCase c = {.parts = {n / 2, n - n / 2}, .packs = RandomPacks(8, rows, random)};
    c.dy = RandomMatrix(Family::kNormal, rows, n, n, random);
    c.x = RandomMatrix(Family::kNormal, rows, columns, columns, random);
    ExpectWeightGradient(c, ExactWeightGradient(c));
    if (HasFailure()) return;
  }
}

TEST(GradientErrorTest, PacksAreAPowerOfTwo) {
  WeightCase c = {.parts = {8}, .packs = {0, 8, 16, 24}};
  c.dy = {24, 8, 8};
  c.x = {24, 8, 8};
  WeightGradientArgs args = ArgsOf(c, nullptr, nullptr, nullptr);
  EXPECT_TRUE(absl::IsInvalidArgument(cuda::Run(args, {})));
  c.packs = {0, 8, 16};
  args = ArgsOf(c, nullptr, nullptr, nullptr);
  args.continues = true;
  EXPECT_TRUE(absl::IsInvalidArgument(cuda::Run(args, {})));
}

// A tile's box of dY may begin at multiples of 16 bytes only.
TEST(GradientErrorTest, TilesNeedPartsThatBeginAtMultiplesOfEight) {
  const auto has_tiles = [](std::vector<int64_t> parts) {
    WeightCase c = {.parts = std::move(parts), .packs = {0, 16}};
    c.dy = {16, 16, 16};
    c.x = {16, 8, 8};
    return HasWeightGradientTiles(ArgsOf(c, nullptr, nullptr, nullptr));
  };
  EXPECT_TRUE(has_tiles({8, 8}));
  EXPECT_TRUE(has_tiles({8, 0, 5}));
  EXPECT_FALSE(has_tiles({4, 8}));
  EXPECT_FALSE(has_tiles({8, 4, 4}));
}

// ---- Controls, which need no GPU

// The expected bits are the oracle's.
TEST(GradientControlTest, ReferenceIsTheOracle) {
  Random random(6);
  OracleBackend oracle;
  for (int i = 0; i < 6; ++i) {
    InputCase c = RandomInputCase(random);
    c.dy = RandomMatrix(Family::kWide, 9, c.dy.columns, c.dy.ld, random);
    std::vector<Bf16> dx(static_cast<size_t>(9 * c.weight.columns));
    ASSERT_TRUE(oracle.Run(ArgsOf(c, c.dy.values.data(), c.weight.values.data(), dx.data())).ok());
    EXPECT_TRUE(SameBits(View(Rounded(ExactInputGradient(c))), View(dx)));
    WeightCase w = RandomWeightCase(1 << (i % 4), random);
    w.x = RandomMatrix(Family::kWide, w.x.rows, 5, 8, random);
    const std::vector<float> expected = ExactWeightGradient(w);
    std::vector<float> dw(expected.size());
    ASSERT_TRUE(oracle.Run(ArgsOf(w, w.dy.values.data(), w.x.values.data(), dw.data())).ok());
    EXPECT_TRUE(SameBits(View(expected), View(dw)));
  }
}

// On data such as the tests', other orders of addition give other bits.
TEST(GradientControlTest, OrdersDiffer) {
  Random random(7);
  constexpr int64_t kRows = 1024;
  InputCase c = {.parts = {kRows}};
  c.dy = RandomMatrix(Family::kNormal, 100, kRows, kRows, random);
  c.weight = RandomMatrix(Family::kNormal, kRows, 128, 128, random);
  const std::vector<float> chain = ExactInputGradient(c);
  const auto half = [&](int64_t begin) {
    std::vector<Bf16> dy;
    for (int64_t r = 0; r < 100; ++r) {
      for (int64_t i = 0; i < kRows / 2; ++i) dy.push_back(c.dy.at(r, begin + i));
    }
    return OneChain(dy, Transposed(c.weight, begin, begin + kRows / 2), 100, 128, kRows / 2);
  };
  const std::vector<float> halves = TreeOfSums({half(0), half(kRows / 2)});
  EXPECT_GT(Unequal(Rounded(chain), Rounded(halves)), 0);

  WeightCase w = {.parts = {64}, .packs = {0, 100, 300, 500, kRows}};
  w.dy = RandomMatrix(Family::kNormal, kRows, 64, 64, random);
  w.x = RandomMatrix(Family::kNormal, kRows, 64, 64, random);
  const std::vector<float> tree = ExactWeightGradient(w);
  EXPECT_GT(Unequal(tree, PackSum(w, 0, kRows)), 100);
  std::vector<float> in_turn = PackSum(w, 0, w.packs[1]);
  for (size_t i = 1; i < 4; ++i) {
    in_turn = TreeOfSums({in_turn, PackSum(w, w.packs[i], w.packs[i + 1])});
  }
  EXPECT_GT(Unequal(tree, in_turn), 100);
}

}  // namespace
}  // namespace isobit::cuda
