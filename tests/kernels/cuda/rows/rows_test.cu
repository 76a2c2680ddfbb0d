// RMSNorm, SwiGLU, embedding and the sum of partials on a GPU against the CPU backend, bit for bit:
// random shapes and alignments, every family of operands, infinities and NaN, repeated.
#include <algorithm>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/device/swiglu.cuh"
#include "kernels/cuda/common/rows/rows.h"
#include "kernels/cuda/common/vanilla/hop_reduce.h"
#include "tests/kernels/cuda/row_case.h"

namespace isobit::cuda {
namespace {

using testing_support::DeviceBuffer;
using testing_support::Family;
using testing_support::SameBits;
using testing_support::Scaled;
using testing_support::View;
using RowKernelsTest = testing_support::RowTest;

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
      cuda::Run(
          SwiGluArgs{.gate_up = in.data(), .out = out.data(), .rows = kRows, .columns = kGates},
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
    ASSERT_TRUE(cpu_->Run(SwiGluArgs{.gate_up = gate_up.data(),
                                     .out = expected.data(),
                                     .rows = rows,
                                     .columns = columns})
                    .ok());
    DeviceBuffer<Bf16> in(gate_up, Offset(sizeof(Bf16)));
    DeviceBuffer<Bf16> out(rows * columns, Offset(sizeof(Bf16)));
    ASSERT_TRUE(
        cuda::Run(
            SwiGluArgs{.gate_up = in.data(), .out = out.data(), .rows = rows, .columns = columns},
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
    ASSERT_TRUE(cpu_->Run(args).ok());
    DeviceBuffer<int32_t> device_ids(ids);
    DeviceBuffer<Bf16> device_table(table, Offset(sizeof(Bf16)));
    DeviceBuffer<Bf16> out(rows * hidden, Offset(sizeof(Bf16)));
    args.ids = device_ids.data();
    args.table = device_table.data();
    args.out = out.data();
    ASSERT_TRUE(cuda::Run(args, AnyStream()).ok());
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
    ASSERT_TRUE(cpu_->Run(args).ok());

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
      ASSERT_TRUE(cuda::Run(args, AnyStream()).ok());
      EXPECT_TRUE(SameBits(View(out.CopyOut()), View(expected)));
      EXPECT_TRUE(SameBits(View(device_residual.CopyOut()), View(expected_residual)));
    }
    EXPECT_TRUE(out.GuardsIntact() && device_residual.GuardsIntact());
    rows_in_all += rows;
  }
  std::printf("RmsNorm: %d cases, %lld rows\n", cases, static_cast<long long>(rows_in_all));
}

// A row's sum reaches the output through two roundings to bf16, which mostly hide a different last
// bit. Enough rows show it all the same: the control adds the leaves from left to right.
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
  ASSERT_TRUE(cuda::Run(RmsNormArgs{.residual = residual.data(),
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

// NaN counts as equal to NaN: the contract promises no payloads here.
testing::AssertionResult SameSums(std::vector<float> actual, std::vector<float> expected) {
  for (std::vector<float>* values : {&actual, &expected}) {
    for (float& x : *values) x = x != x ? contract::FromBits(0x7fffffffu) : x;
  }
  return SameBits(View(actual), View(expected));
}

TEST_F(RowKernelsTest, Reduce) {
  constexpr NumericsMode kModes[] = {NumericsMode::kTree, NumericsMode::kBatchInvariant,
                                     NumericsMode::kVanilla};
  std::vector<std::unique_ptr<Backend>> cpu;
  for (const NumericsMode mode : kModes) cpu.push_back(MakeCpuBackend({.mode = mode}));
  int cases = 0;
  int ring_differs = 0;
  for (; cases < Scaled(2000) && !HasFailure(); ++cases) {
    const int ranks = 1 << Below(4);
    const auto mode = static_cast<size_t>(Below(3));
    const int64_t count = 1 + Below(cases % 400 == 399 ? 2000000 : int64_t{1} << (1 + Below(16)));
    int64_t begin = Chance(2) ? 0 : Below(count);
    if (Chance(2)) begin = begin / 4 * 4;
    const int64_t end = Chance(2) ? count : begin + Below(count - begin + 1);
    SCOPED_TRACE(absl::StrCat("case ", cases, ": [", begin, ", ", end, ") of ", count, ", ", ranks,
                              " ranks, mode ", mode));
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
                       .out = expected.data()};
    ASSERT_TRUE(cpu[mode]->Run(args).ok());
    if (mode == 2 && ranks > 1) {
      std::vector<float> other(expected.size());
      ReduceArgs from_first = args;
      from_first.out = other.data();
      ASSERT_TRUE(cpu[1]->Run(from_first).ok());
      ring_differs +=
          std::equal(expected.begin() + begin, expected.begin() + end, other.begin() + begin) ? 0
                                                                                              : 1;
    }
    args.partials = device.data();
    args.out = out.data();
    ASSERT_TRUE((mode == 0 ? cuda::Run(args, AnyStream())
                           : LaunchHopReduce(args, /*ring=*/mode == 2, AnyStream()))
                    .ok());
    EXPECT_TRUE(SameSums(out.CopyOut(), expected));
    EXPECT_TRUE(out.GuardsIntact());
  }
  EXPECT_GT(100 * ring_differs, cases);
  std::printf("Reduce: %d cases, in %d the ring's order differs from rank order\n", cases,
              ring_differs);
}

TEST_F(RowKernelsTest, ReduceRefusesThreeRanks) {
  const float* partials[3] = {};
  EXPECT_EQ(cuda::Run(ReduceArgs{.partials = partials, .num_ranks = 3}, {stream_}).code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace isobit::cuda
