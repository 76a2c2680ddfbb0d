// See guess_table.h.
#include "rollout/guess_table.h"

#include <algorithm>
#include <cmath>

#include "common/base/check.h"

namespace isobit {
namespace {

double TimeOf(absl::Span<const StepCost> costs, double rows) {
  size_t right = 1;
  while (right + 1 < costs.size() && costs[right].rows < rows) ++right;
  const StepCost& a = costs[right - 1];
  const StepCost& b = costs[right];
  return a.time + (b.time - a.time) * (rows - a.rows) / (b.rows - a.rows);
}

}  // namespace

GuessTable::GuessTable(const StepCosts& costs, size_t max_running, size_t most)
    : costs_(costs), guesses_(max_running + 1) {
  ISOBIT_CHECK(costs.decode.size() >= 2 && costs.verify.size() >= 2 && most <= UINT8_MAX)
      << costs.decode.size() << " and " << costs.verify.size() << " times, " << most << " guesses";
  const auto measured = static_cast<size_t>(costs.decode.back().rows);
  for (size_t running = 1; running <= std::min(max_running, measured); ++running) {
    const double plain = TimeOf(costs.decode, static_cast<double>(running));
    for (size_t i = 0; i <= kClasses; ++i) {
      const double acceptance = static_cast<double>(i) / kClasses;
      double best = costs.least_gain / plain;
      for (size_t k = 1; k <= most; ++k) {
        const double time = TimeOf(costs.verify, static_cast<double>(running * (1 + k)));
        const double rate = (1.0 + Promise(k, acceptance)) / time;
        if (rate <= best) continue;
        best = rate;
        guesses_[running][i] = static_cast<uint8_t>(k);
      }
    }
  }
}

double GuessTable::Promise(size_t guesses, double acceptance) {
  double tokens = 0.0;
  for (size_t i = 1; i <= guesses; ++i) tokens += std::pow(acceptance, static_cast<double>(i));
  return tokens;
}

bool GuessTable::Pay(size_t num_sequences, size_t guesses, double tokens) const {
  const auto sequences = static_cast<double>(num_sequences);
  const double plain = TimeOf(costs_.decode, sequences);
  const double time = TimeOf(costs_.verify, sequences + static_cast<double>(guesses));
  return (sequences + tokens) / time >= costs_.least_gain * sequences / plain;
}

size_t GuessTable::Guesses(size_t num_running, double acceptance) const {
  const double place = std::clamp(acceptance, 0.0, 1.0) * kClasses;
  const auto& of_running = guesses_[std::min(num_running, guesses_.size() - 1)];
  return of_running[static_cast<size_t>(std::lround(place))];
}

// SmolLM2-135M on two cores with AVX-512, milliseconds. A row costs as much beside others as alone,
// but for the first few.
StepCosts CpuStepCosts() {
  const std::vector<StepCost> costs = {{1, 35},   {2, 46},   {4, 75},   {8, 139},
                                       {16, 272}, {32, 526}, {64, 1038}};
  return {.decode = costs, .verify = costs, .least_gain = 1.15};
}

// Qwen3-8B on one H100 at TP 1, microseconds. A step of so many rows takes longer with more
// sequences, each with less guesses; verify has the longest.
StepCosts GpuStepCosts() {
  return {.decode = {{1, 5506}, {8, 5947}, {32, 7437}, {64, 9527}},
          .verify = {{2, 6283},
                     {16, 6719},
                     {32, 6821},
                     {64, 10340},
                     {128, 11882},
                     {256, 13353},
                     {512, 18784},
                     {1024, 32785}}};
}

}  // namespace isobit
