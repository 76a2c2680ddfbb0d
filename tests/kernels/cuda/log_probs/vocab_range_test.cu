// The shortcuts of vocab_range.cuh against the contract: weights and their sums over every
// float, noise, and the bound below which a token is not tried.
#include <cstdint>

#include "gtest/gtest.h"
#include "kernels/cuda/sm90/log_probs/vocab_range.cuh"
#include "tests/kernels/cuda/device_case.h"

namespace isobit::cuda {
namespace {

using testing_support::DeviceBuffer;

constexpr unsigned kBlocks = 2048;
constexpr unsigned kThreads = 256;

__device__ uint64_t Mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

// Calls check(i) for i in [begin, end) and counts how often it is false.
template <typename Check>
__device__ void CountFailures(uint64_t begin, uint64_t end, unsigned* failures, Check check) {
  unsigned mine = 0;
  for (uint64_t i = begin + blockIdx.x * kThreads + threadIdx.x; i < end;
       i += uint64_t{kBlocks} * kThreads) {
    if (!check(i)) ++mine;
  }
  if (mine > 0) atomicAdd(failures, mine);
}

template <typename Kernel>
unsigned Failures(Kernel kernel) {
  DeviceBuffer<unsigned> failures(std::vector<unsigned>{0});
  kernel<<<kBlocks, kThreads>>>(failures.data());
  ISOBIT_CHECK_CUDA(cudaGetLastError());
  return failures.CopyOut()[0];
}

__global__ void CheckWeights(unsigned* failures) {
  const uint32_t least = contract::BitsOf(kLeastDistance);
  CountFailures(contract::BitsOf(-0.0f), contract::BitsOf(kMinusInfinity) + 1ull, failures,
                [&](uint64_t i) {
                  const float distance = contract::FromBits(static_cast<uint32_t>(i));
                  const float exact = contract::ExpDistance(distance, 0.0f);
                  if (i <= least) {
                    return contract::BitsOf(WeightAt(distance)) == contract::BitsOf(exact);
                  }
                  const float weight = WeightAt(kLeastDistance);
                  return contract::TokenWeight(distance, 0.0f) == 0 &&
                         contract::TokenWeightedDistance(distance, 0.0f) == 0 &&
                         weight < 0x1p-40f && contract::Mul(weight, -kLeastDistance) < 0x1p-40f;
                });
}

__global__ void CheckFractions(unsigned* failures) {
  const auto total = [](float x) {  // each lane of the warp adds x three times and 0 once
    FractionSum sum;
    for (const float y : {x, 0.0f, x, x}) sum.Add(y);
    return sum;
  };
  // All lanes take the same number, or OfWarp would mix them.
  const uint64_t warp = (blockIdx.x * kThreads + threadIdx.x) / 32;
  unsigned mine = 0;
  for (uint64_t i = warp; i <= contract::BitsOf(1.0f); i += uint64_t{kBlocks} * kThreads / 32) {
    const float x = contract::FromBits(static_cast<uint32_t>(i));
    const auto exact = static_cast<uint64_t>(static_cast<int64_t>(contract::Mul(x, 0x1p40f)));
    if (total(x).OfWarp() != 96 * exact) ++mine;
  }
  if (mine > 0) atomicAdd(failures, mine);
}

__global__ void CheckNoise(unsigned* failures) {
  __shared__ RoundKeys keys;
  const NoiseKey key{Mix(blockIdx.x), blockIdx.x, static_cast<uint32_t>(Mix(blockIdx.x + 7))};
  keys.Set(key.seed, threadIdx.x);
  __syncthreads();
  for (uint32_t i = 0; i < 64; ++i) {
    const auto id_counter = static_cast<uint32_t>(Mix(uint64_t{i} << 32 | threadIdx.x));
    const contract::PhiloxBlock actual = CounterNoise(keys, key, id_counter);
    const contract::PhiloxBlock expected =
        contract::TokenNoise(key.seed, key.sample, key.position, id_counter);
    for (int w = 0; w < 4; ++w) {
      if (actual.words[w] != expected.words[w]) atomicAdd(failures, 1u);
    }
  }
}

// A token whose value ties with the best one must be tried. As a control, counts how many of the
// tokens that are two nats short are not tried.
template <bool kControl>
__global__ void CheckPruning(unsigned* failures) {
  CountFailures(0, uint64_t{1} << 28, failures, [](uint64_t i) {
    const uint64_t random = Mix(i);
    const uint64_t more = Mix(random);
    const int exponent = static_cast<int>(more % 24) - 4;
    const float max =
        contract::Mul(static_cast<float>(static_cast<int32_t>(more >> 32)) * 0x1p-31f,
                      contract::FromBits(static_cast<uint32_t>(127 + exponent) << 23));
    const float distance =
        -static_cast<float>(random >> 40) * 0x1p-24f * (more >> 8 & 1 ? 25.0f : 1.0f);
    const float z = contract::Add(max, distance);
    uint32_t word = static_cast<uint32_t>(random);
    if ((more >> 9 & 3) == 0) word >>= random >> 32 & 31;  // a small word makes large noise
    const float value = contract::Add(z, contract::Gumbel(word));
    const float best = kControl ? contract::Add(value, 2.0f) : value;
    const float weight = WeightAt(fmaxf(contract::Sub(z, max), kLeastDistance));
    return IsCandidate(weight, word, PruneFactor(max, best));
  });
}

__global__ void CheckLeastGumbel(unsigned* failures) {
  CountFailures(0, uint64_t{1} << 32, failures, [](uint64_t word) {
    return contract::Gumbel(static_cast<uint32_t>(word)) >= kLeastGumbel;
  });
}

using VocabRangeTest = testing_support::GpuTest;

TEST_F(VocabRangeTest, WeightsEqualTheContract) { EXPECT_EQ(Failures(CheckWeights), 0u); }

TEST_F(VocabRangeTest, FractionsTruncateAsTheContractDoes) {
  EXPECT_EQ(Failures(CheckFractions), 0u);
}

TEST_F(VocabRangeTest, NoiseEqualsTheContract) { EXPECT_EQ(Failures(CheckNoise), 0u); }

TEST_F(VocabRangeTest, LeastGumbelIsABound) { EXPECT_EQ(Failures(CheckLeastGumbel), 0u); }

TEST_F(VocabRangeTest, NoWinnerIsTurnedAway) {
  EXPECT_EQ(Failures(CheckPruning<false>), 0u);
  EXPECT_GT(Failures(CheckPruning<true>), 1u << 27);
}

}  // namespace
}  // namespace isobit::cuda
