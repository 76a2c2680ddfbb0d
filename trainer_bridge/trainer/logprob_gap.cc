// Compares token by token, and adds up the estimates of KL.
#include "trainer_bridge/trainer/logprob_gap.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace isobit::trainer {
namespace {

// NaN, infinite, or above 0.
bool IsImpossible(float logprob) { return !(std::isfinite(logprob) && logprob <= 0); }

std::string Describe(const Completion& completion, size_t token, float trainer) {
  const auto side = [](const char* name, float value) {
    return absl::StrFormat("%s %.9g (0x%08x)", name, value, std::bit_cast<uint32_t>(value));
  };
  return absl::StrCat("prompt ", completion.number, ", sample ", completion.index, ", token ",
                      token, ": ", side("rollout", completion.logprobs[token]), ", ",
                      side("trainer", trainer));
}

}  // namespace

absl::StatusOr<LogprobGap> FindGap(absl::Span<const Completion> completions,
                                   const Logprobs& trainer) {
  if (trainer.size() != completions.size()) {
    return absl::InvalidArgumentError(absl::StrCat("expected logprobs of ", completions.size(),
                                                   " completions, got ", trainer.size()));
  }
  LogprobGap gap;
  for (size_t i = 0; i < completions.size(); ++i) {
    const std::vector<float>& sampled = completions[i].logprobs;
    if (sampled.size() != trainer[i].size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "completion ", i, ": expected ", sampled.size(), " logprobs, got ", trainer[i].size()));
    }
    gap.tokens += static_cast<int64_t>(sampled.size());
    for (size_t t = 0; t < sampled.size(); ++t) {
      const float a = sampled[t];
      const float b = trainer[i][t];
      const bool is_impossible = IsImpossible(a) || IsImpossible(b);
      const bool is_equal =
          std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) && !std::isnan(a);
      if (is_equal && !is_impossible) continue;
      if (gap.first.empty()) gap.first = Describe(completions[i], t, b);
      if (!is_equal) ++gap.unequal;
      if (is_impossible) ++gap.impossible;
      double dlogp = double{a} - double{b};
      // No number says how far a NaN, or equal infinities, are apart: nothing of that may vanish.
      if (std::isnan(dlogp)) dlogp = std::numeric_limits<double>::infinity();
      gap.max_abs_dlogp = std::max(gap.max_abs_dlogp, std::abs(dlogp));
      // An equal token adds nothing.
      gap.kl += std::expm1(-dlogp) + dlogp;
      gap.kl_k1 += dlogp;
      gap.kl_k2 += 0.5 * dlogp * dlogp;
    }
  }
  for (double* const sum : {&gap.kl, &gap.kl_k1, &gap.kl_k2}) {
    *sum /= static_cast<double>(std::max<int64_t>(gap.tokens, 1));
  }
  return gap;
}

}  // namespace isobit::trainer
