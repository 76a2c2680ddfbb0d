// Compares the contract's functions on a GPU with the same source on the CPU, bit for bit. Skips
// with a message if there is no device.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/contract/attention.h"
#include "kernels/contract/leaf_plan.h"
#include "kernels/contract/log_prob.h"
#include "kernels/contract/mma16.h"
#include "kernels/contract/noise.h"
#include "kernels/contract/row_functions.h"
#include "kernels/contract/sampling.h"
#include "kernels/contract/vanilla.h"

namespace isobit::contract {
namespace {

constexpr int kResults = 24;  // words that Evaluate writes

// Every function of the contract on one sample, whose inputs come from the counter-based generator.
ISOBIT_HD void Evaluate(uint32_t sample, uint32_t* out) {
  int n = 0;
  const PhiloxBlock r = TokenNoise(3, 0, 0, sample);
  const float any = FromBits(r.words[0]);  // every exponent, NaN and infinity too
  const float unit = Mul(static_cast<float>(r.words[1]), 0x1p-32f);  // [0, 1]
  const float wide = Mul(Sub(unit, 0.5f), 400.0f);
  out[n++] = r.words[3];
  out[n++] = BitsOf(Exp2(any));
  out[n++] = BitsOf(Exp2(wide));
  out[n++] = BitsOf(Log(any));
  out[n++] = BitsOf(Log(unit));
  out[n++] = BitsOf(Gumbel(r.words[2]));
  out[n++] = BitsOf(Sigmoid(wide));
  out[n++] = FloatToBf16(any);
  out[n++] = static_cast<uint32_t>(TokenWeight(wide, 200.0f) >> 8);
  out[n++] = static_cast<uint32_t>(-TokenWeightedDistance(Mul(wide, 0.05f), 10.0f) >> 8);
  out[n++] = BitsOf(Penalise(wide, true, 3, 1.1f, 0.25f, 0.125f));
  out[n++] = BitsOf(InverseTemperature(unit));
  out[n++] =
      static_cast<uint32_t>(NucleusBound(static_cast<int64_t>(r.words[0]) << 20, unit) >> 16);

  Bf16 a[kMmaK];
  Bf16 b[kMmaK];
  float values[kMmaK];
  const bool narrow = sample % 2 == 0;  // half the samples near 1, half of any bit pattern
  for (int k = 0; k < kMmaK; ++k) {
    const PhiloxBlock pair = TokenNoise(5, static_cast<uint32_t>(k), 1, sample);
    a[k] = static_cast<Bf16>(narrow ? (pair.words[0] & 0x83ffu) | 0x3c00u : pair.words[0]);
    b[k] =
        static_cast<Bf16>(narrow ? (pair.words[1] & 0x83ffu) | 0x3c00u : pair.words[1] & 0xbfffu);
    values[k] = Mul(static_cast<float>(pair.words[2]), 0x1p-28f);
  }
  out[n++] = BitsOf(Mma16(narrow ? unit : any, a, b));
  out[n++] = BitsOf(DotChain(0.0f, a, b, 13));
  out[n++] = BitsOf(SumOfSquares(b, 15));
  out[n++] = BitsOf(InverseRms(unit, 15, 1e-6f));
  out[n++] = static_cast<uint32_t>(Normalise(a[0], unit, b[0])) << 16 | SwiGlu(a[1], b[1]);
  const Rotated rotated = Rotate(a[2], b[2], unit, Sub(1.0f, unit));
  out[n++] = static_cast<uint32_t>(rotated.first) << 16 | rotated.second;
  out[n++] = BitsOf(TreeOf(values, 8)) ^ BitsOf(ChainOf(values, 8));
  out[n++] = BitsOf(HopSum(values, 4, 3));

  SoftmaxRow row;
  const float alpha = UpdateSoftmax(row, values, kMmaK, 0.18f);
  SplitSum folded{wide, unit};
  const FoldFactors f = Fold(folded, FinishSplit(row, 0.18f));
  out[n++] = BitsOf(FoldAccumulator(unit, Add(values[3], alpha), f));
  out[n++] = BitsOf(folded.sum);
  const VocabSum sum =
      Combine({wide, Add(unit, 1.0f), -1.0f}, RangeSum(3.0f, int64_t{r.words[2]} << 10, -5));
  out[n++] = BitsOf(Add(LogProb(wide, sum), Entropy(sum)));
}

__global__ void EvaluateKernel(uint32_t samples, uint32_t* out) {
  const uint32_t sample = blockIdx.x * blockDim.x + threadIdx.x;
  if (sample < samples) Evaluate(sample, out + int64_t{sample} * kResults);
}

bool IsNan(uint32_t bits) { return (bits & 0x7f800000u) == 0x7f800000u && (bits & 0x7fffffu) != 0; }

TEST(DeviceContractTest, EveryFunctionHasTheHostsBits) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0)
    GTEST_SKIP() << "no CUDA device on this machine";
  constexpr uint32_t kSamples = 1 << 20;
  uint32_t* device = nullptr;
  ASSERT_EQ(cudaMalloc(&device, size_t{kSamples} * kResults * sizeof(uint32_t)), cudaSuccess);
  EvaluateKernel<<<kSamples / 128, 128>>>(kSamples, device);
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  std::vector<uint32_t> actual(size_t{kSamples} * kResults);
  ASSERT_EQ(
      cudaMemcpy(actual.data(), device, actual.size() * sizeof(uint32_t), cudaMemcpyDeviceToHost),
      cudaSuccess);
  cudaFree(device);

  std::vector<int64_t> different(kResults, 0);
  std::vector<int64_t> nans(kResults, 0);
  for (uint32_t s = 0; s < kSamples; ++s) {
    uint32_t expected[kResults];
    Evaluate(s, expected);
    for (int i = 0; i < kResults; ++i) {
      const uint32_t got = actual[size_t{s} * kResults + static_cast<size_t>(i)];
      // Outside C1 no NaN payload is promised; the Mma16 result is word 13.
      const bool both_nan = i != 13 && IsNan(got) && IsNan(expected[i]);
      nans[i] += both_nan ? 1 : 0;
      if (got != expected[i] && !both_nan && different[i]++ == 0) {
        std::printf("word %d, sample %u: device %08x, host %08x\n", i, s, got, expected[i]);
      }
    }
  }
  for (int i = 0; i < kResults; ++i)
    EXPECT_EQ(different[i], 0) << "word " << i << ", NaN on both sides " << nans[i];
}

}  // namespace
}  // namespace isobit::contract
