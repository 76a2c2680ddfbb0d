// The scalar definition of logprobs and sampling: sorts the whole row and follows the text of C7
// and C8.
#include "kernels/oracle/log_probs.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/contract/leaf_plan.h"
#include "kernels/contract/noise.h"
#include "kernels/contract/sampling.h"
#include "kernels/oracle/kernels.h"

namespace isobit::oracle {
namespace {

using contract::kMinusInfinity;

// Bias, bans, penalties, temperature.
std::vector<float> Process(const float* logits, int64_t vocab, const RowSampling& s) {
  std::vector<float> z(logits, logits + vocab);
  for (const TokenBias& b : s.biases) {
    z[static_cast<size_t>(b.id)] = contract::Add(z[static_cast<size_t>(b.id)], b.bias);
  }
  for (const int32_t id : s.banned) z[static_cast<size_t>(id)] = kMinusInfinity;
  for (const TokenCount& c : s.counts) {
    z[static_cast<size_t>(c.id)] =
        contract::Penalise(z[static_cast<size_t>(c.id)], c.in_prompt, c.in_output,
                           s.repetition_penalty, s.presence_penalty, s.frequency_penalty);
  }
  const float inverse = contract::InverseTemperature(s.temperature);
  for (float& value : z) value = contract::Mul(value, inverse);
  return z;
}

// Token ids in the order of the filters.
std::vector<int32_t> Ranking(const std::vector<float>& z) {
  std::vector<int32_t> order(z.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&z](int32_t a, int32_t b) {
    return contract::Before(z[static_cast<size_t>(a)], a, z[static_cast<size_t>(b)], b);
  });
  return order;
}

void Filter(std::vector<float>& z, const RowSampling& s) {
  const std::vector<int32_t> order = Ranking(z);
  const float max = z[static_cast<size_t>(order[0])];
  size_t kept = 0;
  while (kept < order.size() &&
         contract::PassesMinP(z[static_cast<size_t>(order[kept])], max, s.min_p)) {
    ++kept;
  }
  if (s.top_k > 0) kept = std::min(kept, static_cast<size_t>(s.top_k));
  if (s.top_p < 1.0f) {
    int64_t total = 0;
    for (size_t i = 0; i < kept; ++i)
      total += contract::TokenWeight(z[static_cast<size_t>(order[i])], max);
    const int64_t bound = contract::NucleusBound(total, s.top_p);
    int64_t before = 0;
    size_t nucleus = 0;
    while (nucleus < kept && before < bound) {
      before += contract::TokenWeight(z[static_cast<size_t>(order[nucleus++])], max);
    }
    kept = nucleus;
  }
  for (size_t i = kept; i < order.size(); ++i) z[static_cast<size_t>(order[i])] = kMinusInfinity;
}

int32_t Draw(const std::vector<float>& z, const RowSampling& s) {
  int32_t best = -1;
  float best_value = kMinusInfinity;
  for (int32_t id = 0; id < static_cast<int32_t>(z.size()); ++id) {
    float value = z[static_cast<size_t>(id)];
    if (value == kMinusInfinity) continue;
    if (s.temperature > 0.0f) {
      value = contract::Add(
          value, contract::TokenGumbel(s.seed, s.sample, s.position, static_cast<uint32_t>(id)));
    }
    if (best < 0 || value > best_value) {
      best = id;
      best_value = value;
    }
  }
  return best;
}

}  // namespace

contract::VocabSum SumVocab(const std::vector<float>& z) {
  const contract::LeafPlan plan = contract::PlanColumns(static_cast<int64_t>(z.size()));
  contract::VocabSum ranges[contract::kLeaves];
  for (size_t l = 0; l < contract::kLeaves; ++l) {
    const auto begin = static_cast<size_t>(plan.bounds[l]);
    const auto end = static_cast<size_t>(plan.bounds[l + 1]);
    float max = kMinusInfinity;
    for (size_t i = begin; i < end; ++i) max = contract::Max(max, z[i]);
    if (max == kMinusInfinity) continue;
    int64_t weights = 0;
    int64_t distances = 0;
    for (size_t i = begin; i < end; ++i) {
      weights += contract::TokenWeight(z[i], max);
      distances += contract::TokenWeightedDistance(z[i], max);
    }
    ranges[l] = contract::RangeSum(max, weights, distances);
  }
  return contract::CombineRanges(ranges);
}

std::vector<float> ProcessLogits(const float* logits, int64_t vocab, const RowSampling& s) {
  if (!std::all_of(logits, logits + vocab, [](float x) { return std::isfinite(x); })) return {};
  std::vector<float> z = Process(logits, vocab, s);
  if (!std::all_of(z.begin(), z.end(), [](float x) { return x < -kMinusInfinity; })) return {};
  if (!std::any_of(z.begin(), z.end(), [](float x) { return x > kMinusInfinity; })) return {};
  const bool filters = s.temperature > 0.0f && (s.top_k > 0 || s.top_p < 1.0f || s.min_p > 0.0f);
  if (filters) Filter(z, s);
  return z;
}

static void ComputeLogProbs(const float* logits, int64_t vocab, const LogProbRequest& request,
                            LogProbResult& result) {
  const RowSampling& s = request.sampling;
  std::vector<float> z = ProcessLogits(logits, vocab, s);
  result.finite = !z.empty();
  if (!result.finite) return;
  result.token.id = request.target >= 0 ? request.target : Draw(z, s);

  if (request.raw) z.assign(logits, logits + vocab);
  const contract::VocabSum sum = SumVocab(z);
  result.token.logprob = contract::LogProb(z[static_cast<size_t>(result.token.id)], sum);
  if (request.want_entropy) result.entropy = contract::Entropy(sum);
  result.top.assign(static_cast<size_t>(request.top_logprobs), {-1, kMinusInfinity});
  if (result.top.empty()) return;
  const std::vector<int32_t> order = Ranking(z);
  for (size_t i = 0; i < std::min(result.top.size(), order.size()); ++i) {
    const float logit = z[static_cast<size_t>(order[i])];
    if (logit > kMinusInfinity) result.top[i] = {order[i], contract::LogProb(logit, sum)};
  }
}

absl::Status Run(const LogProbsArgs& a, Context& /*context*/) {
  for (int64_t r = 0; r < a.num_rows; ++r) {
    ComputeLogProbs(a.logits + r * a.ld, a.vocab, a.requests[r], a.results[r]);
  }
  return absl::OkStatus();
}

}  // namespace isobit::oracle
