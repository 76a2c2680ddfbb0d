// A counter-based generator. See random_weights.h.
#include "kernels/model/random_weights.h"

#include <bit>
#include <cmath>

#include "common/checkpoint/dtype.h"
#include "common/checkpoint/tensor_names.h"

namespace isobit {
namespace {

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;

// A bijection of 64-bit words whose output bits all depend on all input bits (the finaliser of
// SplitMix64).
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Nearly normal, mean 0, variance 1, within +-3.47: the sum of four uniform 16-bit numbers. Integer
// sums and one product have the same bits on every machine; a libm's logarithm may not.
float NearlyNormal(uint64_t random) {
  const int sum = static_cast<int>((random & 0xffff) + ((random >> 16) & 0xffff) +
                                   ((random >> 32) & 0xffff) + (random >> 48));
  constexpr float kInverseDeviation = 0x1.bb67aep-16f;  // of the sum: sqrt(3) / 2^16
  return static_cast<float>(sum - 2 * 65535) * kInverseDeviation;
}

}  // namespace

RandomTensor::RandomTensor(const ExpectedTensor& spec, uint64_t seed) : key_(Mix(seed + kGolden)) {
  for (const char c : spec.name) key_ = Mix(key_ ^ static_cast<uint8_t>(c));
  switch (spec.op) {
    case ParameterOp::kNorm:
    case ParameterOp::kHeadNorm:
      mean_ = 1.0f;
      deviation_ = 0.1f;
      break;
    case ParameterOp::kBias:
      deviation_ = 0.1f;
      break;
    case ParameterOp::kEmbedding:
    case ParameterOp::kLinear: {
      constexpr float kLogitSpread = 2.5f;
      const float unit = 1.0f / std::sqrt(static_cast<float>(spec.shape[1]));
      const bool head = spec.op == ParameterOp::kEmbedding || spec.name == kHeadName;
      deviation_ = head ? kLogitSpread * unit : unit;
      break;
    }
  }
}

void RandomTensor::Draw(size_t first, size_t count, uint16_t* out) const {
  for (size_t i = 0; i < count; ++i) {
    const float x = deviation_ * NearlyNormal(Mix(key_ + kGolden * (first + i + 1)));
    out[i] = Bf16FromF32Bits(std::bit_cast<uint32_t>(mean_ + x));
  }
}

}  // namespace isobit
