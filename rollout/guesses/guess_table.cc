// Measured costs of steps, and the number of guesses that pays.
#include "rollout/guesses/guess_table.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "common/base/check.h"

namespace isobit {
namespace {

// Measured on H200 with SmolLM2-135M at TP 1 at a context of 256 tokens, and with Qwen3-8B at TP 4,
// 2 and 1 at 1,024 (512 for 512 sequences), of which a rank has so many bytes of weights. At TP 4,
// 16 sequences and 65, 129 and 257 rows are estimates after two ranks with the layers of four
// (isobit-bench decode --decode_share=2).
constexpr std::array<double, 4> kGpuBytes = {0.27e9, 4.1e9, 8.2e9, 16.4e9};
// Microseconds.
struct GpuCost {
  double number;
  std::array<double, kGpuBytes.size()> times;
};
constexpr GpuCost kGpuDecode[] = {
    {1, {684, 1672, 2625, 4092}},      {8, {773, 1890, 2650, 4323}},
    {16, {817, 2020, 2842, 4722}},     {32, {986, 2290, 3308, 5581}},
    {64, {1076, 2741, 4268, 7171}},    {128, {1607, 3860, 6016, 10517}},
    {256, {2064, 6490, 10540, 17873}}, {512, {2745, 9248, 14661, 24790}}};
// Of one rank; at TP 4 and 2 interpolated. With two it was 160 to 230, with four 250 to 450.
constexpr GpuCost kGpuAlone = {1, {190, 205, 220, 250}};
constexpr double kGpuAloneOfRank = 30;  // each further one
// In the engine, a step's results and the next one's plan take 0.4 to 0.9 us a sequence.
constexpr double kGpuAloneOfSequence = 1;
// What a row costs depends also on how many sequences share a step's rows; these lie in the middle.
// Rows beyond 64, 128 and 256 need one more tile of each layer.
constexpr GpuCost kGpuRows[] = {{8, {0, 0, 0, 0}},
                                {16, {10, 10, 40, 10}},
                                {32, {80, 170, 200, 130}},
                                {64, {200, 250, 320, 620}},
                                {65, {600, 330, 430, 1400}},
                                {128, {640, 620, 880, 1650}},
                                {129, {760, 1150, 2000, 4200}},
                                {256, {880, 2080, 3050, 4700}},
                                {257, {950, 2850, 4700, 8500}},
                                {512, {1100, 4850, 6900, 11500}},
                                {1024, {1900, 10650, 15450, 25000}},
                                {2048, {3500, 17500, 31400, 55500}}};

double TimeOf(absl::Span<const StepCost> costs, double number) {
  size_t right = 1;
  while (right + 1 < costs.size() && costs[right].number < number) ++right;
  const StepCost& a = costs[right - 1];
  const StepCost& b = costs[right];
  return a.time + (b.time - a.time) * (number - a.number) / (b.number - a.number);
}

}  // namespace

GuessTable::GuessTable(const StepCosts& costs, size_t max_running, size_t most)
    : costs_(costs), guesses_(max_running + 1) {
  ISOBIT_CHECK(costs.decode.size() >= 2 && costs.rows.size() >= 2 && most <= UINT8_MAX)
      << costs.decode.size() << " and " << costs.rows.size() << " times, " << most << " guesses";
  const auto measured = static_cast<size_t>(costs.decode.back().number);
  for (size_t running = 1; running <= std::min(max_running, measured); ++running) {
    const auto sequences = static_cast<double>(running);
    const double plain = TimeOf(costs.decode, sequences);
    for (size_t i = 0; i <= kClasses; ++i) {
      const double acceptance = static_cast<double>(i) / kClasses;
      double best = costs.least_gain / plain;
      for (size_t k = 1; k <= most; ++k) {
        const double time = TimeOfStep(sequences, sequences * static_cast<double>(k));
        const double rate = (1.0 + ExpectedTokens(k, acceptance)) / time;
        if (rate <= best) continue;
        best = rate;
        guesses_[running][i] = static_cast<uint8_t>(k);
      }
    }
  }
}

double GuessTable::TimeOfStep(double sequences, double guesses) const {
  return TimeOf(costs_.decode, sequences) + TimeOf(costs_.rows, sequences + guesses) -
         TimeOf(costs_.rows, sequences) + costs_.alone + sequences * costs_.alone_of_sequence;
}

double GuessTable::ExpectedTokens(size_t guesses, double acceptance) {
  double tokens = 0.0;
  for (size_t i = 1; i <= guesses; ++i) tokens += std::pow(acceptance, static_cast<double>(i));
  return tokens;
}

bool GuessTable::IsWorthIt(size_t num_sequences, size_t guesses, double tokens) const {
  const auto sequences = static_cast<double>(num_sequences);
  const double plain = TimeOf(costs_.decode, sequences);
  const double time = TimeOfStep(sequences, static_cast<double>(guesses));
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
  return {.decode = costs, .rows = costs, .least_gain = 1.15};
}

StepCosts GpuStepCosts(double weight_bytes, int num_ranks) {
  const auto of_weights = [weight_bytes](const GpuCost& cost) {
    std::array<StepCost, kGpuBytes.size()> by_bytes;
    for (size_t i = 0; i < by_bytes.size(); ++i) by_bytes[i] = {kGpuBytes[i], cost.times[i]};
    return TimeOf(by_bytes, std::clamp(weight_bytes, kGpuBytes.front(), kGpuBytes.back()));
  };
  StepCosts costs;
  costs.alone = of_weights(kGpuAlone) + (num_ranks - 1) * kGpuAloneOfRank;
  costs.alone_of_sequence = kGpuAloneOfSequence;
  for (const GpuCost& cost : kGpuDecode) costs.decode.push_back({cost.number, of_weights(cost)});
  for (const GpuCost& cost : kGpuRows) costs.rows.push_back({cost.number, of_weights(cost)});
  return costs;
}

}  // namespace isobit
