// The gradients of logprobs, entropies and losses against central differences in float64.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/oracle/oracle_backend.h"
#include "tests/kernels/oracle/gradient_cases.h"

namespace isobit {
namespace {

using testing_support::kRoundedOnce;
using testing_support::NormalFloats;
using testing_support::Random;
using testing_support::RelativeError;
using testing_support::Slopes;
using testing_support::ToDoubles;

struct Settings {
  float temperature = 1.0f;
  int32_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
};

// Which tokens the filters keep, in float64.
std::vector<bool> KeptTokens(const std::vector<float>& logits, const Settings& s) {
  std::vector<size_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order, [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  const double temperature = s.temperature > 0 ? static_cast<double>(s.temperature) : 1.0;
  std::vector<double> weights;
  for (const size_t id : order) {
    weights.push_back(std::exp(static_cast<double>(logits[id] - logits[order[0]]) / temperature));
  }
  size_t kept = order.size();
  if (s.temperature > 0) {
    kept = static_cast<size_t>(std::ranges::count_if(
        weights, [&](double w) { return w >= static_cast<double>(s.min_p); }));
    if (s.top_k > 0) kept = std::min(kept, static_cast<size_t>(s.top_k));
    const double total =
        std::accumulate(weights.begin(), weights.begin() + static_cast<int>(kept), 0.0);
    double before = 0;
    size_t nucleus = 0;
    while (nucleus < kept && before < total * static_cast<double>(s.top_p))
      before += weights[nucleus++];
    if (s.top_p < 1) kept = nucleus;
  }
  std::vector<bool> is_kept(logits.size());
  for (size_t i = 0; i < kept; ++i) is_kept[order[i]] = true;
  return is_kept;
}

struct Scores {
  double logprob;
  double entropy;
};
Scores Score(const std::vector<double>& logits, const std::vector<bool>& kept, double temperature,
             size_t target) {
  double max = -std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < logits.size(); ++i) {
    if (kept[i]) max = std::max(max, logits[i] / temperature);
  }
  double sum = 0;
  double weighted = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!kept[i]) continue;
    const double distance = logits[i] / temperature - max;
    sum += std::exp(distance);
    weighted += std::exp(distance) * distance;
  }
  return {logits[target] / temperature - max - std::log(sum), std::log(sum) - weighted / sum};
}

TEST(OracleGradientsTest, LogProbs) {
  constexpr size_t kVocab = 300;
  const std::vector<Settings> settings = {
      {},
      {.temperature = 0.7f},
      {.temperature = 0.0f, .top_k = 2},
      {.temperature = 1.3f, .top_k = 17},
      {.temperature = 0.8f, .top_p = 0.9f},
      {.min_p = 0.05f},
      {.temperature = 1.5f, .top_k = 40, .top_p = 0.8f, .min_p = 0.01f}};
  Random random(1);
  for (const Settings& s : settings) {
    const std::vector<float> logits = NormalFloats(kVocab, random, 2.0f);
    const std::vector<bool> kept = KeptTokens(logits, s);
    const int32_t target = static_cast<int32_t>(std::ranges::max_element(logits) - logits.begin());
    for (const bool with_entropy : {false, true}) {
      const float g = -1.25f;
      const float h = 0.75f;
      LogProbRow state;
      float logprob = 0;
      float entropy = 0;
      std::vector<Bf16> d(kVocab);
      const TrainingSampling sampling = {&s.temperature, &s.top_k, &s.top_p, &s.min_p};
      OracleBackend ops;
      ASSERT_TRUE(ops.Run(TrainingLogProbsArgs{logits.data(), 1, kVocab, &target, sampling,
                                               &logprob, &entropy, &state})
                      .ok());
      ASSERT_TRUE(ops.Run(LogProbGradientArgs{logits.data(), 1, kVocab, &target, sampling, &state,
                                              &g, with_entropy ? &h : nullptr, d.data()})
                      .ok());
      const double temperature = s.temperature > 0 ? static_cast<double>(s.temperature) : 1.0;
      const auto loss = [&](const std::vector<double>& at) {
        const Scores scores = Score(at, kept, temperature, static_cast<size_t>(target));
        return static_cast<double>(g) * scores.logprob +
               (with_entropy ? static_cast<double>(h) * scores.entropy : 0.0);
      };
      const std::vector<double> exact = ToDoubles(logits);
      const Scores scores = Score(exact, kept, temperature, static_cast<size_t>(target));
      EXPECT_NEAR(logprob, scores.logprob, 1e-5);
      EXPECT_NEAR(entropy, scores.entropy, 1e-5);
      EXPECT_EQ(state.finite, 1);
      EXPECT_EQ(state.last_id >= 0, std::ranges::count(kept, false) > 0);
      EXPECT_LT(RelativeError(ToDoubles(d), Slopes(loss, exact)), kRoundedOnce);
      for (size_t i = 0; i < kVocab; ++i) EXPECT_TRUE(kept[i] || d[i] == 0) << i;
    }
  }
}

TEST(OracleGradientsTest, ARowThatFailsHasNaNs) {
  std::vector<float> logits = {0.0f, std::numeric_limits<float>::infinity(), 1.0f, 2.0f, 3.0f,
                               3e38f};
  const std::vector<int32_t> targets = {2, 2};
  const std::vector<float> temperatures = {1.0f, 0.01f};  // the second row overflows by its own
  const std::vector<float> g = {1.0f, 1.0f};
  std::vector<LogProbRow> state(2);
  std::vector<float> logprobs(2);
  std::vector<Bf16> d(6);
  const TrainingSampling sampling = {temperatures.data(), nullptr, nullptr, nullptr};
  OracleBackend ops;
  ASSERT_TRUE(ops.Run(TrainingLogProbsArgs{logits.data(), 2, 3, targets.data(), sampling,
                                           logprobs.data(), nullptr, state.data()})
                  .ok());
  ASSERT_TRUE(ops.Run(LogProbGradientArgs{logits.data(), 2, 3, targets.data(), sampling,
                                          state.data(), g.data(), nullptr, d.data()})
                  .ok());
  for (size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(state[r].finite, 0);
    EXPECT_TRUE(std::isnan(logprobs[r]));
  }
  for (const Bf16 x : d) EXPECT_EQ(x, 0x7fff);
}

TEST(OracleGradientsTest, Losses) {
  const double low = 0.1;
  const double high = 0.3;
  const double kl = 0.4;
  struct Case {
    double advantage;
    double logprob;
    std::optional<double> old;
    std::optional<double> reference;
  };
  std::vector<Case> cases;
  for (const double advantage : {-1.5, 0.7}) {
    for (const std::optional<double> reference : {std::optional<double>(), {-1.9}, {-0.4}}) {
      cases.push_back({advantage, -1.0, {}, reference});
      for (const double old : {-2.0, -1.2, -1.05, -0.95, -0.8, -0.1}) {
        cases.push_back({advantage, -1.0, old, reference});
      }
    }
  }
  for (const Case& c : cases) {
    const float weight = 0.25f;
    const auto loss = [&](const std::vector<double>& l) {
      double value = -c.advantage * l[0];
      if (c.old) {
        const double r = std::exp(l[0] - *c.old);
        value = -std::min(r * c.advantage, std::clamp(r, 1 - low, 1 + high) * c.advantage);
      }
      if (c.reference) {
        value += kl * (std::exp(*c.reference - l[0]) - (*c.reference - l[0]) - 1);
      }
      return static_cast<double>(weight) * value;
    };
    const auto logprob = static_cast<float>(c.logprob);
    const auto advantage = static_cast<float>(c.advantage);
    const auto old = static_cast<float>(c.old.value_or(0));
    const auto reference = static_cast<float>(c.reference.value_or(0));
    float value = 0;
    float gradient = 0;
    PolicyLossArgs args;
    args.tokens = 1;
    args.logprobs = &logprob;
    args.advantages = &advantage;
    args.weights = &weight;
    args.old_logprobs = c.old ? &old : nullptr;
    args.reference_logprobs = c.reference ? &reference : nullptr;
    args.clip_low = static_cast<float>(low);
    args.clip_high = static_cast<float>(high);
    args.kl = static_cast<float>(kl);
    args.values = &value;
    args.gradients = &gradient;
    ASSERT_TRUE(OracleBackend().Run(args).ok());
    EXPECT_NEAR(value, loss({c.logprob}), 1e-6);
    EXPECT_NEAR(gradient, Slopes(loss, {c.logprob})[0], 1e-6)
        << c.advantage << " " << c.old.value_or(0) << " " << c.reference.value_or(0);
  }
}

TEST(OracleGradientsTest, TreeSum) {
  Random random(2);
  for (const size_t n : {0, 1, 3, 100, 1000}) {
    const std::vector<float> x = NormalFloats(n, random);
    float sum = 0;
    ASSERT_TRUE(OracleBackend().Run(TreeSumArgs{x.data(), static_cast<int64_t>(n), &sum}).ok());
    double exact = 0;
    for (const float value : x) exact += static_cast<double>(value);
    EXPECT_NEAR(sum, exact, 1e-4);
  }
}

}  // namespace
}  // namespace isobit
