// Shared by the tests that hold the oracle's gradients to float64: random operands, central
// differences, and the distance of two gradients.
#ifndef ISOBIT_TESTS_KERNELS_ORACLE_GRADIENT_CASES_H_
#define ISOBIT_TESTS_KERNELS_ORACLE_GRADIENT_CASES_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/contract/portable.h"

namespace isobit::testing_support {

using contract::Bf16;

using Random = std::mt19937_64;

inline std::vector<float> NormalFloats(size_t n, Random& random, float scale = 1.0f) {
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& value : values) value = scale * normal(random);
  return values;
}

inline std::vector<Bf16> NormalBf16(size_t n, Random& random, float scale = 1.0f) {
  std::vector<Bf16> values(n);
  size_t i = 0;
  for (const float value : NormalFloats(n, random, scale)) {
    values[i++] = contract::FloatToBf16(value);
  }
  return values;
}

inline std::vector<double> ToDoubles(std::span<const Bf16> x) {
  std::vector<double> values;
  for (const Bf16 value : x) values.push_back(contract::Bf16ToFloat(value));
  return values;
}
inline std::vector<double> ToDoubles(std::span<const float> x) { return {x.begin(), x.end()}; }

// df/dx[i] for i = 0, stride, 2 * stride, ..., by central differences; f takes a vector.
template <typename F>
std::vector<double> Slopes(F f, std::vector<double> x, size_t stride = 1) {
  constexpr double kStep = 1e-5;
  std::vector<double> slopes;
  for (size_t i = 0; i < x.size(); i += stride) {
    const double middle = x[i];
    x[i] = middle + kStep;
    const double above = f(x);
    x[i] = middle - kStep;
    const double below = f(x);
    x[i] = middle;
    slopes.push_back((above - below) / (2 * kStep));
  }
  return slopes;
}

// |actual - exact| / |exact|, Euclidean norms. actual has one element for each `stride` of exact.
inline double RelativeError(const std::vector<double>& actual, const std::vector<double>& exact,
                            size_t stride = 1) {
  double error = 0;
  double norm = 0;
  EXPECT_EQ((actual.size() + stride - 1) / stride, exact.size());
  for (size_t i = 0; i < exact.size(); ++i) {
    error += std::pow(actual[i * stride] - exact[i], 2);
    norm += std::pow(exact[i], 2);
  }
  return std::sqrt(error / norm);
}

// The largest relative error of results that are rounded once to bf16.
inline constexpr double kRoundedOnce = 0x1p-8;

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_KERNELS_ORACLE_GRADIENT_CASES_H_
