// The error of our linear layer against float64 is no larger than cuBLAS's, for K = 1024 .. 28672.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/vanilla/cublas_linear.h"
#include "kernels/cuda/sm90/linear/layout.h"
#include "kernels/cuda/sm90/linear/linear.h"
#include "tests/kernels/cpu/op_cases.h"
#include "tests/kernels/cuda/device_case.h"
#include "tests/kernels/cuda/linear/float64_linear.cuh"

namespace isobit::cuda {
namespace {

using contract::LeafSum;
using testing_support::Deviation;
using testing_support::DeviationOf;
using testing_support::DeviceBuffer;
using testing_support::Family;
using testing_support::Float64Linear;
using testing_support::OnH200;
using testing_support::Random;
using testing_support::RandomBf16;

constexpr int64_t kColumns = 512;
constexpr int64_t kRows[] = {1, 64, 512};
constexpr int64_t kDepths[] = {1024, 2048, 3072, 4096, 5120, 8192, 12288, 14336, 25600, 28672};

Deviation DeviationOfFp32(const std::vector<double>& exact, DeviceBuffer<float>& y) {
  const std::vector<float> values = y.CopyOut();
  return DeviationOf(exact, [&](size_t i) { return static_cast<double>(values[i]); });
}

// Both write fp32, so that the sums are compared and not the last rounding. Our error is the same
// for every M. That of cuBLAS depends on the kernel it picks, so ours must stay below its largest
// over M. (For M = 1 and K from 12288 on, cuBLAS picks a kernel that adds more and shorter pieces
// than our eight leaves, and is more accurate there by up to a factor of two.)
TEST(LinearAccuracyTest, OurErrorIsNoLargerThanThatOfCublas) {
  ISOBIT_SKIP_WITHOUT_GPU();
  absl::StatusOr<std::unique_ptr<CublasLinear>> cublas = CublasLinear::Create(0);
  ASSERT_TRUE(cublas.ok()) << cublas.status();
  std::printf(
      "relative to the result's root mean square, in 1e-7: rms (maximum)\n%6s %5s %15s %15s %15s\n",
      "K", "M", "chain", "tree", "cuBLAS");
  for (const int64_t k : kDepths) {
    Random random(static_cast<uint64_t>(k));
    const std::vector<Bf16> w = RandomBf16(Family::kNormal, kColumns * k, random);
    DeviceBuffer<Bf16> x(RandomBf16(Family::kNormal, kRows[2] * k, random));
    DeviceBuffer<Bf16> plain(w);
    LinearShape shape{.n = kColumns, .k = k, .num_leaves = contract::kLeaves};
    std::ranges::copy(contract::PlanColumns(k).bounds, shape.bounds);
    std::vector<std::byte> bytes(PackedLinearBytes(shape));
    PackLinear(shape, w.data(), k, bytes.data());
    DeviceBuffer<std::byte> packed(bytes);
    double ours_rms = 0;
    double cublas_rms = 0;
    for (const int64_t m : kRows) {
      const std::vector<double> exact = Float64Linear(x.data(), k, m, plain.data(), kColumns, k);
      DeviceBuffer<float> y(m * kColumns);
      LinearArgs args{.x = x.data(), .ldx = k, .m = m, .fp32_out = y.data(), .ldy = kColumns};
      std::printf("%6lld %5lld", static_cast<long long>(k), static_cast<long long>(m));
      const auto print = [&](const Deviation& deviation) {
        std::printf("  %6.3f (%5.2f)", deviation.rms * 1e7, deviation.max * 1e7);
      };
      for (const LeafSum sum : {LeafSum::kChain, LeafSum::kTree}) {
        y.Poison();
        shape.sum = sum;
        args.weight = {.shape = shape, .packed = packed.data()};
        ASSERT_TRUE(cuda::Run(args, OnH200()).ok());
        const Deviation deviation = DeviationOfFp32(exact, y);
        ours_rms = std::max(ours_rms, deviation.rms);
        print(deviation);
      }
      y.Poison();
      args.weight.packed = reinterpret_cast<const std::byte*>(plain.data());
      ASSERT_TRUE((*cublas)->Run(args, nullptr, {}).ok());
      const Deviation deviation = DeviationOfFp32(exact, y);
      cublas_rms = std::max(cublas_rms, deviation.rms);
      print(deviation);
      std::printf("\n");
    }
    EXPECT_LE(ours_rms, cublas_rms) << "K = " << k;
  }
}

}  // namespace
}  // namespace isobit::cuda
