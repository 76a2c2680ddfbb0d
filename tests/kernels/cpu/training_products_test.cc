// The products of training: every configuration of the CPU backend has the oracle's bits, for
// ragged shapes, stacked weights, all kinds of packs and operands that are not finite.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/oracle/oracle_backend.h"
#include "tests/kernels/training_cases.h"

namespace isobit::testing_support {
namespace {

#ifdef ISOBIT_SANITIZED
constexpr int kTrials = 4;
#else
constexpr int kTrials = 16;
#endif

// The operands of a layer's three products.
struct Layer {
  int64_t rows = 0;
  int64_t columns = 0;
  std::vector<int64_t> part_rows;
  std::vector<int64_t> packs;
  int64_t padding = 0;   // of leading dimensions
  std::vector<Bf16> x;   // [rows, columns + padding]
  std::vector<Bf16> w;   // [n, columns]
  std::vector<Bf16> dy;  // [rows, n + padding]

  int64_t n() const {
    int64_t sum = 0;
    for (const int64_t part : part_rows) sum += part;
    return sum;
  }
  StackedWeight weight() const {
    StackedWeight weight;
    weight.parts = static_cast<int>(part_rows.size());
    weight.columns = columns;
    const Bf16* data = w.data();
    for (size_t i = 0; i < part_rows.size(); ++i) {
      weight.data[i] = data;
      weight.rows[i] = part_rows[i];
      data += part_rows[i] * columns;
    }
    return weight;
  }
};

void Fill(Family family, Random& random, Layer* layer) {
  layer->x = RandomBf16(family, layer->rows * (layer->columns + layer->padding), random);
  layer->w = RandomBf16(family, layer->n() * layer->columns, random);
  layer->dy = RandomBf16(family, layer->rows * (layer->n() + layer->padding), random);
}

Layer RandomLayer(int trial, Random& random) {
  const auto below = [&random](uint64_t n) { return static_cast<int64_t>(random() % n); };
  Layer layer;
  layer.rows = trial == 0 ? 1 : 1 + below(150);
  layer.columns = trial % 3 == 0 ? 32 * (1 + below(5)) : 1 + below(150);
  for (int64_t part = 0; part <= trial % 3; ++part) {
    layer.part_rows.push_back(trial % 4 == 0 ? 16 * (1 + below(4)) : 1 + below(60));
  }
  layer.packs = RandomPacks(layer.rows, int64_t{1} << (trial == 5 ? 6 : trial % 4), random);
  layer.padding = trial % 2 * 3;
  Fill(kFamilies[trial % 4], random, &layer);
  if (trial % 5 == 4) {
    layer.x[random() % layer.x.size()] = 0x7f80;
    layer.w[random() % layer.w.size()] = 0xff80;
    layer.dy[random() % layer.dy.size()] = 0x7fc1;
  }
  return layer;
}

Bits InputGradient(OpTable& ops, const Layer& layer) {
  Guarded<Bf16> dx(layer.rows * layer.columns);
  EXPECT_TRUE(ops.Run(InputGradientArgs{layer.dy.data(), layer.n() + layer.padding, layer.rows,
                                        layer.weight(), dx.data()})
                  .ok());
  Bits bits;
  bits.Add("dx", dx);
  return bits;
}

// start: where the chains start, or null.
Bits WeightGradient(OpTable& ops, const Layer& layer, const std::vector<float>* start = nullptr) {
  Guarded<float> dw(layer.n() * layer.columns);
  WeightGradientArgs args;
  args.dy = layer.dy.data();
  args.lddy = layer.n() + layer.padding;
  args.x = layer.x.data();
  args.ldx = layer.columns + layer.padding;
  args.packs = layer.packs;
  args.parts = static_cast<int>(layer.part_rows.size());
  args.columns = layer.columns;
  float* data = dw.data();
  if (start != nullptr) std::ranges::copy(*start, data);
  for (size_t i = 0; i < layer.part_rows.size(); ++i) {
    args.part_rows[i] = layer.part_rows[i];
    args.dw[i] = data;
    data += layer.part_rows[i] * layer.columns;
  }
  args.continues = start != nullptr;
  EXPECT_TRUE(ops.Run(args).ok());
  Bits bits;
  bits.Add("dw", dw);
  return bits;
}

TEST(TrainingProductsTest, Gradients) {
  Random random(1);
  for (int trial = 0; trial < kTrials; ++trial) {
    SCOPED_TRACE(trial);
    const Layer layer = RandomLayer(trial, random);
    ExpectOracleBits([&](OpTable& ops) { return InputGradient(ops, layer); });
    ExpectOracleBits([&](OpTable& ops) { return WeightGradient(ops, layer); });
  }
}

// Two passes over a pack that is cut at a multiple of 16 rows are one pass over the whole.
TEST(TrainingProductsTest, AWeightGradientGoesOn) {
  Random random(2);
  Layer layer;
  layer.rows = 75;
  layer.columns = 40;
  layer.part_rows = {20, 21};
  layer.packs = {0, 75};
  Fill(Family::kNormal, random, &layer);
  const Bits whole = ExpectOracleBits([&](OpTable& ops) { return WeightGradient(ops, layer); });
  Layer first = layer;
  first.packs = {0, 48};
  Layer second = layer;
  second.packs = {0, 27};
  second.x.erase(second.x.begin(), second.x.begin() + 48 * layer.columns);
  second.dy.erase(second.dy.begin(), second.dy.begin() + 48 * layer.n());
  const Bits parts = ExpectOracleBits([&](OpTable& ops) {
    const Bits before = WeightGradient(ops, first);
    std::vector<float> start;
    for (const uint64_t pattern : before["dw"]) {
      start.push_back(std::bit_cast<float>(static_cast<uint32_t>(pattern)));
    }
    return WeightGradient(ops, second, &start);
  });
  ExpectSameBits(parts, whole);
}

TEST(TrainingProductsTest, StackedLinear) {
  Random random(3);
  for (int trial = 0; trial < kTrials; ++trial) {
    SCOPED_TRACE(trial);
    const Layer layer = RandomLayer(trial, random);
    const std::vector<float> bias = RandomFloats(Family::kNormal, layer.n(), random);
    const std::vector<Bf16> residual = RandomBf16(Family::kNormal, layer.rows * layer.n(), random);
    StackedLinearArgs args;
    args.x = layer.x.data();
    args.ldx = layer.columns + layer.padding;
    args.m = layer.rows;
    args.weight = layer.weight();
    args.leaves = contract::PlanColumns(layer.columns);
    args.sum = trial % 2 == 0 ? contract::LeafSum::kChain : contract::LeafSum::kTree;
    args.bias = trial / 2 % 2 == 0 ? bias.data() : nullptr;
    ExpectOracleBits([&](OpTable& ops) {
      Guarded<Bf16> rounded(layer.rows * layer.n());
      Guarded<float> sums(layer.rows * layer.n());
      Guarded<Bf16> added(layer.rows * layer.n());
      Guarded<Bf16> in_place(layer.rows * layer.n());
      std::ranges::copy(residual, in_place.data());
      StackedLinearArgs call = args;
      call.bf16_out = rounded.data();
      EXPECT_TRUE(ops.Run(call).ok());
      call.bf16_out = nullptr;
      call.fp32_out = sums.data();
      EXPECT_TRUE(ops.Run(call).ok());
      call.fp32_out = nullptr;
      call.residual = residual.data();
      call.bf16_out = added.data();
      EXPECT_TRUE(ops.Run(call).ok());
      call.residual = call.bf16_out = in_place.data();
      EXPECT_TRUE(ops.Run(call).ok());
      Bits bits;
      bits.Add("bf16", rounded);
      bits.Add("fp32", sums);
      bits.Add("residual", added);
      bits.Add("in place", in_place);
      EXPECT_EQ(bits["residual"], bits["in place"]);
      return bits;
    });
  }
}

// The bits above depend on the order of the steps and of the packs, so a wrong order would show.
TEST(TrainingProductsTest, OrderMatters) {
  Random random(4);
  Layer layer;
  layer.rows = 128;
  layer.columns = 64;
  layer.part_rows = {256};
  layer.packs = {0, 32, 64, 96, 128};
  Fill(Family::kNormal, random, &layer);
  // The second half of n cancels the first but for what the chain truncates, so bf16 shows the
  // order.
  for (int64_t n = 128; n < 256; ++n) {
    for (int64_t r = 0; r < layer.rows; ++r)
      layer.dy[static_cast<size_t>(r * 256 + n)] = layer.dy[static_cast<size_t>(r * 256 + n - 128)];
    for (int64_t c = 0; c < 64; ++c)
      layer.w[static_cast<size_t>(n * 64 + c)] =
          layer.w[static_cast<size_t>((n - 128) * 64 + c)] ^ 0x8000;
  }
  ExpectOracleBits([&](OpTable& ops) { return InputGradient(ops, layer); });
  OracleBackend oracle;
  const Bits dx = InputGradient(oracle, layer);
  const Bits dw = WeightGradient(oracle, layer);

  Layer steps_reversed = layer;  // K of the input gradient, whose columns are rows here
  steps_reversed.w = WithBlocksReversed(layer.w, layer.columns);
  for (int64_t r = 0; r < layer.rows; ++r) {
    const std::vector<Bf16> row(layer.dy.begin() + r * 256, layer.dy.begin() + (r + 1) * 256);
    std::ranges::copy(WithBlocksReversed(row, 1), steps_reversed.dy.begin() + r * 256);
  }
  EXPECT_GT(Differences(InputGradient(oracle, steps_reversed)["dx"], dx["dx"]), 1000);

  Layer rows_reversed = layer;
  rows_reversed.x = WithBlocksReversed(layer.x, layer.columns);
  rows_reversed.dy = WithBlocksReversed(layer.dy, layer.n());
  EXPECT_GT(Differences(WeightGradient(oracle, rows_reversed)["dw"], dw["dw"]), 1000);

  Layer packs_rotated = layer;  // ((b + c) + (d + a)) instead of ((a + b) + (c + d))
  std::rotate(packs_rotated.x.begin(), packs_rotated.x.begin() + 32 * layer.columns,
              packs_rotated.x.end());
  std::rotate(packs_rotated.dy.begin(), packs_rotated.dy.begin() + 32 * layer.n(),
              packs_rotated.dy.end());
  EXPECT_GT(Differences(WeightGradient(oracle, packs_rotated)["dw"], dw["dw"]), 1000);
}

}  // namespace
}  // namespace isobit::testing_support
