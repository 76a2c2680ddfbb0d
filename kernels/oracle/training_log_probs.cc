// Logprobs of training rows and their gradients (C7, C8, C14).
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/contract/log_prob.h"
#include "kernels/contract/sampling.h"
#include "kernels/oracle/kernels.h"
#include "kernels/oracle/log_probs.h"

namespace isobit::oracle {
namespace {

constexpr Bf16 kBf16NaN = 0x7fff;

RowSampling SamplingOf(const TrainingSampling& s, int64_t row) {
  RowSampling sampling;
  if (s.temperature != nullptr) sampling.temperature = s.temperature[row];
  if (s.top_k != nullptr) sampling.top_k = s.top_k[row];
  if (s.top_p != nullptr) sampling.top_p = s.top_p[row];
  if (s.min_p != nullptr) sampling.min_p = s.min_p[row];
  return sampling;
}

// z: the row, with -inf for what is filtered out, or empty if the row fails.
LogProbRow StateOf(const std::vector<float>& z) {
  LogProbRow state;
  if (z.empty()) return state;
  const contract::VocabSum sum = SumVocab(z);
  state.sum = {sum.max, sum.sum, sum.weighted_distance};
  state.finite = 1;
  bool filtered = false;
  int32_t last = -1;
  for (int32_t id = 0; id < static_cast<int32_t>(z.size()); ++id) {
    const float value = z[static_cast<size_t>(id)];
    if (value == contract::kMinusInfinity) {
      filtered = true;
    } else if (last < 0 || contract::Before(z[static_cast<size_t>(last)], last, value, id)) {
      last = id;
    }
  }
  if (!filtered) return state;
  state.last_id = last;
  state.last_z = z[static_cast<size_t>(last)];
  return state;
}

}  // namespace

absl::Status Run(const TrainingLogProbsArgs& a, Context& /*context*/) {
  for (int64_t r = 0; r < a.rows; ++r) {
    const std::vector<float> z =
        ProcessLogits(a.logits + r * a.vocab, a.vocab, SamplingOf(a.sampling, r));
    a.state[r] = StateOf(z);
    const contract::RowDistribution& row = a.state[r].sum;
    const contract::VocabSum sum = {row.max, row.sum, row.weighted_distance};
    const float nan = contract::FromBits(0x7fffffffu);
    a.logprobs[r] = z.empty() ? nan : contract::LogProb(z[static_cast<size_t>(a.targets[r])], sum);
    if (a.entropies != nullptr) a.entropies[r] = z.empty() ? nan : contract::Entropy(sum);
  }
  return absl::OkStatus();
}

// Filters the row again: the state only saves other backends that work.
absl::Status Run(const LogProbGradientArgs& a, Context& /*context*/) {
  for (int64_t r = 0; r < a.rows; ++r) {
    const RowSampling sampling = SamplingOf(a.sampling, r);
    const std::vector<float> z = ProcessLogits(a.logits + r * a.vocab, a.vocab, sampling);
    const contract::RowDistribution row = StateOf(z).sum;
    const float inverse_temperature = contract::InverseTemperature(sampling.temperature);
    const float dentropy = a.dentropies != nullptr ? a.dentropies[r] : 0.0f;
    for (int64_t v = 0; v < a.vocab; ++v) {
      Bf16& out = a.dlogits[r * a.vocab + v];
      if (z.empty()) {
        out = kBf16NaN;
      } else if (z[static_cast<size_t>(v)] == contract::kMinusInfinity) {
        out = 0;
      } else {
        out = contract::LogitGradient(z[static_cast<size_t>(v)], v == a.targets[r], row,
                                      a.dlogprobs[r], dentropy, inverse_temperature);
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace isobit::oracle
