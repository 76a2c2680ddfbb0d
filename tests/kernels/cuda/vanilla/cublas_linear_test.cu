// The vanilla linear layer against float64: every kind of output, bias, odd sizes, an empty K, gaps
// between rows, and a replayed graph.
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/vanilla/cublas_linear.h"
#include "kernels/plain_weight_packer.h"
#include "tests/kernels/cpu/op_cases.h"
#include "tests/kernels/cuda/device_case.h"
#include "tests/kernels/cuda/linear/float64_linear.cuh"

namespace isobit::cuda {
namespace {

using testing_support::DeviationOf;
using testing_support::DeviceBuffer;
using testing_support::Family;
using testing_support::Float64Linear;
using testing_support::Random;
using testing_support::RandomBf16;
using testing_support::RandomFloats;

// A bf16 result is off by at most 2^-9 of itself, and as much again where a bias is added to it; an
// fp32 result by far less.
constexpr double kBf16Bound = 0x1p-8;
constexpr double kFp32Bound = 0x1p-16;

// One layer's operands on the device and its product in float64, the bias added.
class Problem {
 public:
  Problem(int64_t m, int64_t n, int64_t k, bool bias, Random& random)
      : m_(m), n_(n), k_(k), x_(RandomBf16(Family::kNormal, m * (k + 8), random)) {
    const std::vector<Bf16> w = RandomBf16(Family::kNormal, n * k, random);
    std::vector<Bf16> packed(w.size());
    const PlainWeightPacker packer;
    packer.Pack({.n = n, .k = k}, w.data(), k, reinterpret_cast<std::byte*>(packed.data()));
    EXPECT_EQ(packer.PackedBytes({.n = n, .k = k}), packed.size() * sizeof(Bf16));
    w_ = std::make_unique<DeviceBuffer<Bf16>>(packed);
    exact_ = Float64Linear(x_.data(), k + 8, m, w_->data(), n, k);
    if (!bias) return;
    const std::vector<float> values = RandomFloats(Family::kNormal, n, random);
    bias_ = std::make_unique<DeviceBuffer<float>>(values);
    for (int64_t i = 0; i < m * n; ++i) {
      exact_[static_cast<size_t>(i)] += static_cast<double>(values[static_cast<size_t>(i % n)]);
    }
  }

  // Without the output.
  LinearArgs Args() {
    return {.x = x_.data(),
            .ldx = k_ + 8,
            .m = m_,
            .weight = {.shape = {.n = n_, .k = k_},
                       .packed = reinterpret_cast<const std::byte*>(w_->data())},
            .bias = bias_ == nullptr ? nullptr : bias_->data()};
  }
  const std::vector<double>& exact() const { return exact_; }

 private:
  int64_t m_;
  int64_t n_;
  int64_t k_;
  DeviceBuffer<Bf16> x_;
  std::unique_ptr<DeviceBuffer<Bf16>> w_;
  std::unique_ptr<DeviceBuffer<float>> bias_;
  std::vector<double> exact_;
};

double FloatOf(float x) { return static_cast<double>(x); }
double FloatOf(Bf16 x) { return static_cast<double>(contract::Bf16ToFloat(x)); }

class CublasLinearTest : public testing::Test {
 protected:
  void SetUp() override {
    ISOBIT_SKIP_WITHOUT_GPU();
    absl::StatusOr<std::unique_ptr<CublasLinear>> linear = CublasLinear::Create(0);
    ASSERT_TRUE(linear.ok()) << linear.status();
    linear_ = std::move(*linear);
    ISOBIT_CHECK_CUDA(cudaStreamCreate(&stream_));
  }
  void TearDown() override {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  std::unique_ptr<CublasLinear> linear_;
  cudaStream_t stream_ = nullptr;
};

struct Size {
  int64_t m;
  int64_t n;
  int64_t k;
};
constexpr Size kSizes[] = {{1, 1, 1},      {1, 257, 64},   {3, 96, 1000},
                           {17, 130, 333}, {64, 512, 512}, {300, 1000, 768}};

TEST_F(CublasLinearTest, IsCloseToFloat64) {
  Random random(1);
  for (const Size& size : kSizes) {
    for (const bool bias : {false, true}) {
      SCOPED_TRACE(testing::Message() << size.m << " x " << size.n << " x " << size.k << bias);
      Problem problem(size.m, size.n, size.k, bias, random);
      const int64_t ldy = size.n + 3;
      const auto check = [&]<typename T>(DeviceBuffer<T>& y, double bound) {
        const std::vector<T> values = y.CopyOut();
        const auto at = [&](size_t i) {
          const auto n = static_cast<size_t>(size.n);
          return FloatOf(values[i / n * static_cast<size_t>(ldy) + i % n]);
        };
        EXPECT_LE(DeviationOf(problem.exact(), at).rms, bound);
        EXPECT_TRUE(y.GuardsIntact());
        EXPECT_TRUE(std::isnan(FloatOf(values[static_cast<size_t>(size.n)])));  // between rows
      };
      DeviceBuffer<Bf16> bf16(size.m * ldy);
      LinearArgs args = problem.Args();
      args.bf16_out = bf16.data();
      args.ldy = ldy;
      ASSERT_TRUE(linear_->Run(args, nullptr, {.handle = stream_}).ok());
      check(bf16, kBf16Bound);

      DeviceBuffer<float> fp32(size.m * ldy);
      args.bf16_out = nullptr;
      args.fp32_out = fp32.data();
      ASSERT_TRUE(linear_->Run(args, nullptr, {.handle = stream_}).ok());
      check(fp32, kFp32Bound);
    }
  }
}

// gate_up rounds to bf16 before SwiGLU, as the op says.
TEST_F(CublasLinearTest, SwiGluFollowsTheProduct) {
  Random random(2);
  constexpr int64_t kM = 33;
  constexpr int64_t kColumns = 200;
  Problem problem(kM, 2 * kColumns, 256, false, random);
  DeviceBuffer<Bf16> out(kM * kColumns);
  LinearArgs args = problem.Args();
  args.weight.shape.gated = true;
  args.swiglu_out = out.data();
  args.ldy = kColumns;
  DeviceBuffer<Bf16> gate_up(kM * 2 * kColumns);
  ASSERT_TRUE(linear_->Run(args, gate_up.data(), {.handle = stream_}).ok());
  const std::vector<Bf16> values = out.CopyOut();
  std::vector<double> exact;
  for (size_t i = 0; i < values.size(); ++i) {
    const size_t first = i / kColumns * 2 * kColumns + i % kColumns;
    const double gate = problem.exact()[first];
    exact.push_back(gate / (1 + std::exp(-gate)) * problem.exact()[first + kColumns]);
  }
  EXPECT_LE(DeviationOf(exact, [&](size_t i) { return FloatOf(values[i]); }).rms, 2 * kBf16Bound);
  EXPECT_TRUE(out.GuardsIntact());
  EXPECT_TRUE(gate_up.GuardsIntact());
  EXPECT_EQ(linear_->Run(args, nullptr, {.handle = stream_}).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(CublasLinearTest, AnEmptyKGivesZerosAndNothingIsALaunch) {
  Random random(3);
  Problem problem(4, 16, 0, true, random);
  DeviceBuffer<float> y(4 * 16);
  LinearArgs args = problem.Args();
  args.fp32_out = y.data();
  args.ldy = 16;
  ASSERT_TRUE(linear_->Run(args, nullptr, {.handle = stream_}).ok());
  const std::vector<float> values = y.CopyOut();
  for (size_t i = 0; i < values.size(); ++i) EXPECT_EQ(FloatOf(values[i]), problem.exact()[i]);
  args.m = 0;
  EXPECT_TRUE(linear_->Run(args, nullptr, {.handle = stream_}).ok());
}

TEST_F(CublasLinearTest, AReplayedGraphComputesAnew) {
  Random random(4);
  Problem problem(8, 256, 512, true, random);
  DeviceBuffer<float> y(8 * 256);
  LinearArgs args = problem.Args();
  args.fp32_out = y.data();
  args.ldy = 256;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ISOBIT_CHECK_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
  ASSERT_TRUE(linear_->Run(args, nullptr, {.handle = stream_}).ok());
  ISOBIT_CHECK_CUDA(cudaStreamEndCapture(stream_, &graph));
  ISOBIT_CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  for (int replay = 0; replay < 3; ++replay) {
    y.Poison();
    ISOBIT_CHECK_CUDA(cudaGraphLaunch(executable, stream_));
    const std::vector<float> values = y.CopyOut();
    EXPECT_LE(DeviationOf(problem.exact(), [&](size_t i) { return FloatOf(values[i]); }).rms,
              kFp32Bound);
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

}  // namespace
}  // namespace isobit::cuda
