// C8: from logits to a filtered distribution, and the order of all its steps.
//
// For each row, as in vLLM: logit bias, then bans, then penalties (repetition, frequency,
// presence), then temperature, then the filters min-p, top-k and top-p. Each filter works on the
// tokens that the one before it kept. A token that is filtered out gets logit -inf. Filters keep a
// prefix of the tokens, ordered by descending logit, ties by lowest id. Top-p sums integer weights,
// so the order of summation cannot move the boundary.
#ifndef ISOBIT_KERNELS_CONTRACT_SAMPLING_H_
#define ISOBIT_KERNELS_CONTRACT_SAMPLING_H_

#include <cstdint>

#include "kernels/contract/log_prob.h"
#include "kernels/contract/portable.h"

namespace isobit::contract {

// Penalties as in vLLM. If the token is in prompt or output, repetition divides a positive logit
// and multiplies a negative one. Frequency is subtracted once per occurrence in the output,
// presence once if there is any.
ISOBIT_HD float Penalise(float logit, bool in_prompt, int32_t in_output, float repetition,
                         float presence, float frequency) {
  if (repetition != 1.0f && (in_prompt || in_output > 0)) {
    logit = logit > 0.0f ? Div(logit, repetition) : Mul(logit, repetition);
  }
  logit = Sub(logit, Mul(frequency, static_cast<float>(in_output)));
  return in_output > 0 ? Sub(logit, presence) : logit;
}

// The factor for logits. Temperature 0 (greedy) counts as 1; NaN makes the row fail.
ISOBIT_HD float InverseTemperature(float temperature) {
  return temperature == 0.0f ? 1.0f : Div(1.0f, temperature);
}

// Whether token a comes before token b. Filters,
// top logprobs and every maximum use this order.
ISOBIT_HD bool Before(float logit_a, int32_t id_a, float logit_b, int32_t id_b) {
  return logit_a > logit_b || (logit_a == logit_b && id_a < id_b);
}

// Top-p keeps a token if the weights (TokenWeight against the row maximum) of all tokens before it
// sum to less than this bound. `total`: the sum of the weights of the tokens that min-p and top-k
// kept. top_p is in (0, 1); 1 switches the filter off.
ISOBIT_HD int64_t NucleusBound(int64_t total, float top_p) {
  const double bound = static_cast<double>(total) * static_cast<double>(top_p);
  const int64_t floor = static_cast<int64_t>(bound);
  return static_cast<double>(floor) < bound ? floor + 1 : floor;
}

// Min-p keeps a token if its probability and that of every token before it are at least min_p times
// the largest.
ISOBIT_HD bool PassesMinP(float z, float max, float min_p) { return ExpDistance(z, max) >= min_p; }

}  // namespace isobit::contract

#endif  // ISOBIT_KERNELS_CONTRACT_SAMPLING_H_
