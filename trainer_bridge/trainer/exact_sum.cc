// See exact_sum.h.
#include "trainer_bridge/trainer/exact_sum.h"

#include <cmath>
#include <utility>
#include <vector>

namespace isobit::trainer {
namespace {

struct Pair {
  double high;
  double low;  // high + low is the sum, exactly
};

Pair TwoSum(double a, double b) {
  if (std::abs(a) < std::abs(b)) std::swap(a, b);
  const double high = a + b;
  return {high, b - (high - a)};
}

// Numbers whose exact sum is that of all that were added. Each is smaller than the last bit of the
// next one (Shewchuk's expansions).
class Expansion {
 public:
  void Add(double value) {
    std::vector<double> next;
    next.reserve(parts_.size() + 1);
    for (const double part : parts_) {
      const Pair sum = TwoSum(value, part);
      if (sum.low != 0.0) next.push_back(sum.low);
      value = sum.high;
    }
    next.push_back(value);
    parts_ = std::move(next);
  }

  double Rounded() const {
    double sum = 0.0;
    for (size_t i = parts_.size(); i > 0; --i) {
      const Pair pair = TwoSum(sum, parts_[i - 1]);
      sum = pair.high;
      if (pair.low == 0.0) continue;
      // What is left cannot reach the next number, unless `low` is half the way there: then the
      // sign of the parts below it decides, where TwoSum has rounded to even.
      if (i > 1 && std::signbit(parts_[i - 2]) == std::signbit(pair.low)) {
        const double other = sum + 2 * pair.low;
        if (other - sum == 2 * pair.low) sum = other;
      }
      break;
    }
    return sum;
  }

 private:
  std::vector<double> parts_;  // ascending
};

}  // namespace

double ExactSum(absl::Span<const double> values) {
  double plain = 0.0;
  Expansion sum;
  for (const double value : values) {
    plain += value;
    sum.Add(value);
  }
  return std::isfinite(plain) ? sum.Rounded() : plain;
}

double Mean(absl::Span<const double> values) {
  return ExactSum(values) / static_cast<double>(values.size());
}

double Deviation(absl::Span<const double> values) {
  const double mean = Mean(values);
  std::vector<double> squares;
  squares.reserve(values.size());
  for (const double value : values) squares.push_back((value - mean) * (value - mean));
  return std::sqrt(Mean(squares));
}

}  // namespace isobit::trainer
