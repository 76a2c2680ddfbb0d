// Column sums and the gradients of RMSNorm, SwiGLU and the embedding on a GPU against the oracle,
// bit for bit: random shapes, packs and alignments, infinities and NaN. Each with a control that
// shows that another order of sums, or another expression, would be found.
#include "kernels/contract/gradients.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/ops/embedding.h"
#include "kernels/ops/linear.h"
#include "kernels/ops/rms_norm.h"
#include "kernels/ops/swiglu.h"
#include "tests/kernels/cuda/gradient_case.h"

namespace isobit::cuda {
namespace {

using contract::Bf16ToFloat;
using testing_support::DeviceBuffer;
using testing_support::Family;
using testing_support::RandomBf16;
using testing_support::SameBits;
using testing_support::SameNumbers;
using testing_support::Scaled;
using testing_support::View;
using testing_support::Workspace;

class GradientsTest : public testing_support::GradientTest {
 protected:
  std::vector<float> RunColumnSums(const std::vector<Bf16>& x, int64_t ldx, int64_t columns,
                                   const std::vector<int64_t>& packs) {
    DeviceBuffer<Bf16> device_x(x, Offset(sizeof(Bf16)));
    DeviceBuffer<float> out(columns, Offset(sizeof(float)));
    const ColumnSumsArgs args = {device_x.data(), ldx, columns, packs, out.data()};
    const Workspace workspace;
    EXPECT_TRUE(cuda::Run(args, workspace.On(AnyStream())).ok());
    EXPECT_TRUE(out.GuardsIntact() && workspace.GuardsIntact());
    return out.CopyOut();
  }
};

TEST_F(GradientsTest, ColumnSums) {
  int cases = 0;
  for (; cases < Scaled(400) && !HasFailure(); ++cases) {
    const int64_t columns = Width(6000);
    const int64_t rows = RowsOfPacks(columns, cases % 10 == 0 ? 1000000 : 100000);
    const int64_t ldx = columns + (Chance(2) ? 0 : Chance(2) ? 8 : Below(9));
    const std::vector<int64_t> packs = AnyPacks(rows);
    SCOPED_TRACE(absl::StrCat("case ", cases, ": ", rows, " x ", columns, ", ", packs.size() - 1));
    const std::vector<Bf16> x = operands_.Bf16s(rows * ldx, Chance(4));
    std::vector<float> expected(static_cast<size_t>(columns));
    ASSERT_TRUE(oracle_.Run(ColumnSumsArgs{x.data(), ldx, columns, packs, expected.data()}).ok());
    EXPECT_TRUE(SameNumbers(RunColumnSums(x, ldx, columns, packs), expected));
  }
  std::printf("ColumnSums: %d cases\n", cases);
}

// Controls: one chain over all rows; blocks counted from row 0 and not from the pack's first. The
// exponents are spread: the sum of bf16 values of like size is often exact in every order.
TEST_F(GradientsTest, AWrongOrderOfColumnSumsShows) {
  constexpr int64_t kRows = 1000;
  constexpr int64_t kColumns = 512;
  const std::vector<int64_t> packs = {0, 300, 300, 631, kRows};
  const std::vector<Bf16> x = RandomBf16(Family::kWide, kRows * kColumns, random_);
  const std::vector<float> actual = RunColumnSums(x, kColumns, kColumns, packs);
  int unequal[2] = {};
  for (int64_t c = 0; c < kColumns; ++c) {
    float chain = 0.0f;
    contract::TreeSum tree;
    for (size_t p = 0; p + 1 < packs.size(); ++p) {
      float sum = 0.0f;
      float block = 0.0f;
      for (int64_t r = packs[p]; r < packs[p + 1]; ++r) {
        const float value = Bf16ToFloat(x[static_cast<size_t>(r * kColumns + c)]);
        chain = contract::Add(chain, value);
        block = contract::Add(block, value);
        if (r % contract::kColumnSumRows == contract::kColumnSumRows - 1 || r + 1 == packs[p + 1]) {
          sum = contract::Add(sum, block);
          block = 0.0f;
        }
      }
      tree.Push(sum);
    }
    const float y = actual[static_cast<size_t>(c)];
    unequal[0] += chain != y ? 1 : 0;
    unequal[1] += tree.Total() != y ? 1 : 0;
  }
  EXPECT_GT(unequal[0], kColumns / 2);
  EXPECT_GT(unequal[1], kColumns / 4);
  std::printf("of %d columns, %d differ as one chain, %d with blocks from row 0\n",
              static_cast<int>(kColumns), unequal[0], unequal[1]);
}

TEST_F(GradientsTest, NumberOfPacks) {
  const std::vector<int64_t> three = {0, 1, 2, 3};
  std::vector<int64_t> many(129);
  for (const std::vector<int64_t>& packs : {three, many, {}}) {
    EXPECT_EQ(cuda::Run(ColumnSumsArgs{.columns = 8, .packs = packs}, {stream_}).code(),
              absl::StatusCode::kInvalidArgument);
  }
}

struct NormCase {
  int64_t rows;
  int64_t columns;
  std::vector<Bf16> x, weight, dy;
  std::vector<int64_t> packs;
  float eps;
  std::vector<Bf16> dx = std::vector<Bf16>(x.size());
  std::vector<float> dw = std::vector<float>(weight.size());

  RmsNormGradientArgs Args() {
    return {.x = x.data(),
            .weight = weight.data(),
            .dy = dy.data(),
            .columns = columns,
            .eps = eps,
            .packs = packs,
            .dx = dx.data(),
            .dw = dw.data()};
  }
};

class NormGradientTest : public GradientsTest {
 protected:
  // Sets dx and dw.
  void Run(NormCase* c) {
    DeviceBuffer<Bf16> x(c->x, Offset(sizeof(Bf16)));
    DeviceBuffer<Bf16> weight(c->weight, Offset(sizeof(Bf16)));
    DeviceBuffer<Bf16> dy(c->dy, Offset(sizeof(Bf16)));
    DeviceBuffer<Bf16> dx(c->rows * c->columns, Offset(sizeof(Bf16)));
    DeviceBuffer<float> dw(c->columns, Offset(sizeof(float)));
    RmsNormGradientArgs args = c->Args();
    args.x = x.data();
    args.weight = weight.data();
    args.dy = dy.data();
    args.dx = dx.data();
    args.dw = dw.data();
    const Workspace workspace;
    EXPECT_TRUE(cuda::Run(args, workspace.On(AnyStream())).ok());
    EXPECT_TRUE(dx.GuardsIntact() && dw.GuardsIntact() && workspace.GuardsIntact());
    c->dx = dx.CopyOut();
    c->dw = dw.CopyOut();
  }
};

TEST_F(NormGradientTest, RandomCases) {
  int cases = 0;
  for (; cases < Scaled(600) && !HasFailure(); ++cases) {
    const int64_t columns = Width(20000);
    const int64_t rows = RowsOfPacks(columns, cases % 10 == 0 ? 600000 : 60000);
    const bool specials = Chance(4);
    NormCase c = {.rows = rows,
                  .columns = columns,
                  .x = operands_.Bf16s(rows * columns, specials),
                  .weight = operands_.Bf16s(columns, false),
                  .dy = operands_.Bf16s(rows * columns, specials),
                  .packs = AnyPacks(rows),
                  .eps = Chance(8) ? 0.0f : 1e-6f};
    // Rows of gradients of zero and of negative values have dot products of -0 or +0.
    for (int64_t r = 0; r < rows; ++r) {
      if (Chance(8)) std::fill_n(c.dy.begin() + r * columns, columns, Bf16{0});
      if (!Chance(8)) continue;
      for (int64_t i = 0; i < columns; ++i) c.x[static_cast<size_t>(r * columns + i)] |= 0x8000;
    }
    SCOPED_TRACE(
        absl::StrCat("case ", cases, ": ", rows, " x ", columns, ", ", c.packs.size() - 1));
    ASSERT_TRUE(oracle_.Run(c.Args()).ok());
    const std::vector<Bf16> dx = c.dx;
    const std::vector<float> dw = c.dw;
    Run(&c);
    EXPECT_TRUE(SameBits(View(c.dx), View(dx)));
    EXPECT_TRUE(SameNumbers(c.dw, dw));
  }
  std::printf("RmsNormGradient: %d cases\n", cases);
}

// Controls: the dot product's leaves from left to right, and dw as one chain over the rows.
TEST_F(NormGradientTest, AWrongOrderShows) {
  constexpr int64_t kRows = 1000;
  constexpr int64_t kColumns = 1024;
  NormCase c = {.rows = kRows,
                .columns = kColumns,
                .x = RandomBf16(Family::kNormal, kRows * kColumns, random_),
                .weight = RandomBf16(Family::kNormal, kColumns, random_),
                .dy = RandomBf16(Family::kNormal, kRows * kColumns, random_),
                .packs = {0, kRows},
                .eps = 1e-6f};
  Run(&c);
  int64_t dx_unequal = 0;
  std::vector<float> chains(kColumns);
  for (int64_t r = 0; r < kRows; ++r) {
    const Bf16* x = c.x.data() + r * kColumns;
    const Bf16* dy = c.dy.data() + r * kColumns;
    const float inverse =
        contract::InverseRms(contract::SumOfSquares(x, kColumns), kColumns, c.eps);
    std::vector<float> h(kColumns);
    std::vector<float> g(kColumns);
    for (size_t i = 0; i < kColumns; ++i) {
      h[i] = contract::Mul(Bf16ToFloat(x[i]), inverse);
      g[i] = contract::Mul(Bf16ToFloat(dy[i]), Bf16ToFloat(c.weight[i]));
      chains[i] = contract::Add(chains[i], contract::NormWeightTerm(dy[i], x[i], inverse));
    }
    float dot = 0.0f;
    for (size_t i = 0; i < kColumns; i += 4) {
      dot = contract::Add(dot, contract::DotLeaf({g[i], g[i + 1], g[i + 2], g[i + 3]},
                                                 {h[i], h[i + 1], h[i + 2], h[i + 3]}));
    }
    const float mean = contract::Div(dot, kColumns);
    for (size_t i = 0; i < kColumns; ++i) {
      const Bf16 wrong = contract::NormGradient(h[i], g[i], mean, inverse);
      dx_unequal += wrong != c.dx[static_cast<size_t>(r * kColumns) + i] ? 1 : 0;
    }
  }
  int dw_unequal = 0;
  for (size_t i = 0; i < kColumns; ++i) dw_unequal += chains[i] != c.dw[i] ? 1 : 0;
  EXPECT_GT(dx_unequal, 0);
  EXPECT_GT(dw_unequal, kColumns / 2);
  std::printf("a chain of leaves: %d elements of dx differ; a chain of rows: %d of dw\n",
              static_cast<int>(dx_unequal), dw_unequal);
}

TEST_F(GradientsTest, SwiGluGradient) {
  int cases = 0;
  for (; cases < Scaled(600) && !HasFailure(); ++cases) {
    const int64_t columns = Width(20000);
    const int64_t rows = Rows(columns, cases % 50 == 0 ? 1000000 : 60000);
    SCOPED_TRACE(absl::StrCat("case ", cases, ": ", rows, " x ", columns));
    std::vector<Bf16> gate_up = operands_.Bf16s(rows * 2 * columns, Chance(4));
    const std::vector<Bf16> ds = operands_.Bf16s(rows * columns, Chance(4));
    std::vector<Bf16> expected(gate_up.size());
    SwiGluGradientArgs args = {gate_up.data(), ds.data(), rows, columns, expected.data()};
    ASSERT_TRUE(oracle_.Run(args).ok());
    DeviceBuffer<Bf16> device_gate_up(gate_up, Offset(sizeof(Bf16)));
    DeviceBuffer<Bf16> device_ds(ds, Offset(sizeof(Bf16)));
    DeviceBuffer<Bf16> out(rows * 2 * columns, Offset(sizeof(Bf16)));
    args = {device_gate_up.data(), device_ds.data(), rows, columns, out.data()};
    ASSERT_TRUE(cuda::Run(args, AnyStream()).ok());
    EXPECT_TRUE(SameBits(View(out.CopyOut()), View(expected)));
    EXPECT_TRUE(out.GuardsIntact());
  }
  std::printf("SwiGluGradient: %d cases\n", cases);
}

// Every gate; the control is the derivative in its textbook form.
TEST_F(GradientsTest, SwiGluGradientOfEveryGate) {
  constexpr int64_t kGates = 65536;
  constexpr int64_t kRows = 16;
  const std::vector<Bf16> ups = operands_.Bf16s(kRows, true);
  const std::vector<Bf16> of_rows = operands_.Bf16s(kRows, false);
  std::vector<Bf16> gate_up;
  std::vector<Bf16> ds;
  for (size_t r = 0; r < kRows; ++r) {
    for (int64_t g = 0; g < kGates; ++g) gate_up.push_back(static_cast<Bf16>(g));
    gate_up.insert(gate_up.end(), kGates, ups[r]);
    ds.insert(ds.end(), kGates, of_rows[r]);
  }
  std::vector<Bf16> expected(gate_up.size());
  SwiGluGradientArgs args = {gate_up.data(), ds.data(), kRows, kGates, expected.data()};
  ASSERT_TRUE(oracle_.Run(args).ok());
  DeviceBuffer<Bf16> device_gate_up(gate_up);
  DeviceBuffer<Bf16> device_ds(ds);
  DeviceBuffer<Bf16> out(static_cast<int64_t>(gate_up.size()));
  args = {device_gate_up.data(), device_ds.data(), kRows, kGates, out.data()};
  ASSERT_TRUE(cuda::Run(args, {stream_}).ok());
  EXPECT_TRUE(SameBits(View(out.CopyOut()), View(expected)));
  int unequal = 0;
  for (size_t g = 0; g < kGates; ++g) {
    const float gate = Bf16ToFloat(static_cast<Bf16>(g));
    const float t = contract::Sigmoid(gate);
    const float slope =
        contract::Mul(t, contract::Add(1.0f, contract::Mul(gate, contract::Sub(1.0f, t))));
    const float wrong =
        contract::Mul(contract::Mul(Bf16ToFloat(of_rows[0]), Bf16ToFloat(ups[0])), slope);
    unequal += contract::FloatToBf16(wrong) != expected[g] ? 1 : 0;
  }
  EXPECT_GT(unequal, 0);
  std::printf("the textbook's derivative: %d of 65536 gates differ\n", unequal);
}

// Which rows have which id, of ids drawn at random: a few occur often.
struct EmbeddingCase {
  std::vector<int32_t> ids, starts, rows;
  std::vector<Bf16> dy;
  std::vector<int64_t> packs;
  std::vector<float> head_sums;  // empty: none

  EmbeddingGradientArgs Args(int64_t hidden) const {
    EmbeddingGradientArgs args;
    args.dy = dy.data();
    args.hidden = hidden;
    args.table = {ids.data(), starts.data(), rows.data(), static_cast<int64_t>(ids.size())};
    args.packs = packs;
    args.head_sums = head_sums.empty() ? nullptr : head_sums.data();
    return args;
  }
};

class EmbeddingGradientTest : public GradientsTest {
 protected:
  EmbeddingCase AnyCase(int64_t num_rows, int64_t hidden, int64_t vocab, bool tied) {
    EmbeddingCase c;
    std::vector<std::vector<int32_t>> rows_of(static_cast<size_t>(vocab));
    for (int32_t r = 0; r < num_rows; ++r) {
      rows_of[static_cast<size_t>(Chance(3) ? 0 : Below(vocab))].push_back(r);
    }
    std::vector<int32_t> order(static_cast<size_t>(vocab));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    for (const int32_t id : order) {
      const std::vector<int32_t>& rows = rows_of[static_cast<size_t>(id)];
      if (rows.empty() && !Chance(4)) continue;
      c.ids.push_back(id);
      c.starts.push_back(static_cast<int32_t>(c.rows.size()));
      c.rows.insert(c.rows.end(), rows.begin(), rows.end());
    }
    c.starts.push_back(static_cast<int32_t>(c.rows.size()));
    c.packs = AnyPacks(num_rows);
    c.dy = operands_.Bf16s(num_rows * hidden, Chance(4));
    if (tied) {
      c.head_sums = operands_.Floats(
          static_cast<int64_t>((c.packs.size() - 1) * c.ids.size()) * hidden, false);
      for (float& sum : c.head_sums) sum = contract::Add(sum, 0.0f);  // a C2 sum is never -0
    }
    return c;
  }

  // The table's gradient, [vocab, hidden], whose other rows keep `unwritten`.
  std::vector<float> Run(const EmbeddingCase& c, int64_t hidden, int64_t vocab, float unwritten) {
    DeviceBuffer<int32_t> ids(c.ids);
    DeviceBuffer<int32_t> starts(c.starts);
    DeviceBuffer<int32_t> rows(c.rows);
    DeviceBuffer<Bf16> dy(c.dy, Offset(sizeof(Bf16)));
    DeviceBuffer<float> head_sums(c.head_sums, Offset(sizeof(float)));
    DeviceBuffer<float> out(std::vector<float>(static_cast<size_t>(vocab * hidden), unwritten),
                            Offset(sizeof(float)));
    EmbeddingGradientArgs args = c.Args(hidden);
    args.dy = dy.data();
    args.table = {ids.data(), starts.data(), rows.data(), args.table.num_ids};
    args.head_sums = c.head_sums.empty() ? nullptr : head_sums.data();
    args.dtable = out.data();
    EXPECT_TRUE(cuda::Run(args, AnyStream()).ok());
    EXPECT_TRUE(out.GuardsIntact());
    return out.CopyOut();
  }
};

TEST_F(EmbeddingGradientTest, RandomCases) {
  int cases = 0;
  for (; cases < Scaled(400) && !HasFailure(); ++cases) {
    const int64_t hidden = Width(3000);
    const int64_t rows = RowsOfPacks(hidden, 100000);
    const int64_t vocab = 1 + Below(60);
    const EmbeddingCase c = AnyCase(rows, hidden, vocab, Chance(2));
    SCOPED_TRACE(absl::StrCat("case ", cases, ": ", rows, " x ", hidden, ", ", c.packs.size() - 1));
    std::vector<float> expected(static_cast<size_t>(vocab * hidden), -7.0f);
    EmbeddingGradientArgs args = c.Args(hidden);
    args.dtable = expected.data();
    ASSERT_TRUE(oracle_.Run(args).ok());
    EXPECT_TRUE(SameNumbers(Run(c, hidden, vocab, -7.0f), expected));
  }
  std::printf("EmbeddingGradient: %d cases\n", cases);
}

// Control: the head's sums after the rows, and not before them.
TEST_F(EmbeddingGradientTest, AWrongOrderShows) {
  constexpr int64_t kHidden = 512;
  EmbeddingCase c = AnyCase(200, kHidden, 1, true);
  c.dy = RandomBf16(Family::kNormal, 200 * kHidden, random_);
  EmbeddingCase alone = c;
  alone.head_sums.clear();
  alone.packs = c.packs = {0, 200};
  c.head_sums.resize(kHidden);
  const std::vector<float> before = Run(c, kHidden, 1, 0.0f);
  const std::vector<float> rows = Run(alone, kHidden, 1, 0.0f);
  int unequal = 0;
  for (size_t i = 0; i < kHidden; ++i) {
    unequal += contract::Add(rows[i], c.head_sums[i]) != before[i] ? 1 : 0;
  }
  EXPECT_GT(unequal, 0);
  std::printf("head's sums at the end: %d of %d columns differ\n", unequal,
              static_cast<int>(kHidden));
}

}  // namespace
}  // namespace isobit::cuda
