// The rotary table: exp, log, cosine and sine in float64 from IEEE operations alone. See rope.h.
#include "kernels/contract/rope.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace isobit::contract {
namespace {

constexpr double kLn2 = 0x1.62e42fefa39efp-1;
constexpr double kTwoPi = 0x1.921fb54442d18p+2;

// Relative error below 2^-50 for the arguments of a rotary table (normal numbers: theta, factors,
// turns in a context).
double Log(double x) {
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  int exponent = static_cast<int>(bits >> 52) - 1023;
  double m = std::bit_cast<double>((bits & 0xfffffffffffffu) | 0x3ff0000000000000u);
  if (m > 0x1.6a09e667f3bcdp+0) {  // sqrt(2): keeps the series' argument below 0.172
    m = m / 2;
    ++exponent;
  }
  const double s = (m - 1) / (m + 1);  // log(m) = 2 atanh(s)
  const double square = s * s;
  double series = 0;
  for (int n = 41; n >= 3; n -= 2) series = (series + 1.0 / n) * square;
  return exponent * kLn2 + 2 * (s + s * series);
}

double Exp(double x) {
  const double n = std::floor(x / kLn2 + 0.5);
  const double f = (x - n * 0x1.62e42fee00000p-1) - n * 0x1.a39ef35793c76p-33;  // ln 2 in two parts
  double series = 1;
  for (int k = 20; k >= 1; --k) series = 1 + f / k * series;
  return series *
         std::bit_cast<double>(static_cast<uint64_t>(static_cast<int64_t>(n) + 1023) << 52);
}

struct CosineAndSine {
  double cosine;
  double sine;
};

// Cody-Waite reduction by pi/2 as a sum of three terms. The first two have 33 bits, so that
// quadrant * term is exact for quadrants below 2^20. Then Taylor series on [-pi/4, pi/4]; the first
// neglected term is below 2^-60.
CosineAndSine CosSin(double angle) {
  const double quadrant = std::floor(angle * 0x1.45f306dc9c883p-1 + 0.5);
  double x = angle - quadrant * 0x1.921fb54400000p+0;
  x = x - quadrant * 0x1.0b4611a600000p-34;
  x = x - quadrant * 0x1.3198a2e037073p-69;
  const double square = x * x;
  double cosine = 1;
  for (int k = 20; k >= 2; k -= 2) cosine = 1 - square / (k * (k - 1)) * cosine;
  double sine = 1;
  for (int k = 21; k >= 3; k -= 2) sine = 1 - square / (k * (k - 1)) * sine;
  sine = sine * x;
  switch (static_cast<int64_t>(quadrant) & 3) {
    case 0:
      return {cosine, sine};
    case 1:
      return {-sine, cosine};
    case 2:
      return {-cosine, -sine};
    default:
      return {sine, -cosine};
  }
}

double ScaleLlama3(double frequency, const RopeScaling& s) {
  const double wavelength = kTwoPi / frequency;
  if (wavelength > s.original_max_positions / s.low_freq_factor) return frequency / s.factor;
  if (wavelength < s.original_max_positions / s.high_freq_factor) return frequency;
  const double smooth = (s.original_max_positions / wavelength - s.low_freq_factor) /
                        (s.high_freq_factor - s.low_freq_factor);
  return (1 - smooth) * frequency / s.factor + smooth * frequency;
}

// Between the pairs `low` and `high` yarn blends kept frequencies into divided ones.
struct YarnRamp {
  double low;
  double high;

  // The weight of the divided frequency for pair i, in [0, 1].
  double operator()(int32_t i) const { return std::clamp((i - low) / (high - low), 0.0, 1.0); }
};

YarnRamp MakeYarnRamp(int32_t head_dim, double log_theta, const RopeScaling& s) {
  // The pair, as a fractional index, that turns `turns` times in the original context.
  const auto pair_of = [&](double turns) {
    return head_dim * Log(s.original_max_positions / (turns * kTwoPi)) / (2 * log_theta);
  };
  double low = pair_of(s.beta_fast);
  double high = pair_of(s.beta_slow);
  if (s.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, head_dim - 1.0);
  if (low == high) high = high + 0.001;
  return {low, high};
}

// The factor by which yarn scales queries, and likewise keys, in a stretched context.
double YarnScale(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * Log(factor) + 1;
}

}  // namespace

std::vector<float> InverseFrequencies(int32_t head_dim, double theta, const RopeScaling& scaling) {
  std::vector<float> frequencies;
  const double log_theta = Log(theta);
  const bool yarn = scaling.type == RopeScaling::Type::kYarn;
  const YarnRamp ramp = yarn ? MakeYarnRamp(head_dim, log_theta, scaling) : YarnRamp{0, 1};
  for (int32_t i = 0; i < head_dim / 2; ++i) {
    double frequency = Exp(-log_theta * (2.0 * i / head_dim));
    if (scaling.type == RopeScaling::Type::kLinear) frequency = frequency / scaling.factor;
    if (scaling.type == RopeScaling::Type::kLlama3) frequency = ScaleLlama3(frequency, scaling);
    if (yarn) frequency = frequency / scaling.factor * ramp(i) + frequency * (1 - ramp(i));
    frequencies.push_back(static_cast<float>(frequency));
  }
  return frequencies;
}

double AttentionFactor(const RopeScaling& s) {
  if (s.type != RopeScaling::Type::kYarn) return 1;
  if (s.attention_factor != 0) return s.attention_factor;
  if (s.mscale == 0 || s.mscale_all_dim == 0) return YarnScale(s.factor, 1);
  return YarnScale(s.factor, s.mscale) / YarnScale(s.factor, s.mscale_all_dim);
}

RopeTable MakeRopeTable(int64_t positions, int32_t head_dim, double theta,
                        const RopeScaling& scaling) {
  const std::vector<float> frequencies = InverseFrequencies(head_dim, theta, scaling);
  const double attention = AttentionFactor(scaling);
  RopeTable table;
  table.cosine.reserve(static_cast<size_t>(positions) * frequencies.size());
  table.sine.reserve(table.cosine.capacity());
  for (int64_t p = 0; p < positions; ++p) {
    for (const float frequency : frequencies) {
      const CosineAndSine value = CosSin(static_cast<double>(p) * static_cast<double>(frequency));
      table.cosine.push_back(static_cast<float>(value.cosine * attention));
      table.sine.push_back(static_cast<float>(value.sine * attention));
    }
  }
  return table;
}

}  // namespace isobit::contract
