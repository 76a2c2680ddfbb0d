// Losses over tokens, the elementwise functions of which losses are made, and sums.
#ifndef ISOBIT_KERNELS_OPS_LOSSES_H_
#define ISOBIT_KERNELS_OPS_LOSSES_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/contract/losses.h"

namespace isobit {

struct PolicyLossArgs {
  int64_t tokens = 0;
  const float* logprobs = nullptr;  // [tokens], like all that follow
  const float* advantages = nullptr;
  const float* weights = nullptr;
  const float* old_logprobs = nullptr;        // null: policy gradient; else the clipped loss
  const float* reference_logprobs = nullptr;  // null: no KL term
  float clip_low = 0.2f;                      // at least 0; also clip_high; infinity: no bound
  float clip_high = 0.2f;
  float kl = 0.0f;  // at least 0, finite
  float* values = nullptr;
  float* gradients = nullptr;
};
// INVALID_ARGUMENT: a bound of the clipped loss, or the factor of its KL term, is out of range.
// Every backend's PolicyLoss returns this error.
absl::Status CheckBounds(const PolicyLossArgs& args);

// An elementwise function of which losses are made, and its gradient.
struct LossFunctionArgs {
  contract::LossFunction function = contract::LossFunction::kExp;
  int64_t count = 0;
  const float* x = nullptr;  // [count], like all that follow
  float* values = nullptr;
  float* gradients = nullptr;
};

// sum[0] = C5's tree over x, with one value per leaf.
struct TreeSumArgs {
  const float* x = nullptr;  // [count]
  int64_t count = 0;
  float* sum = nullptr;
};

// sums[i] = C5's tree over x[bounds[i]] .. x[bounds[i + 1] - 1], with one value per leaf. Bounds
// ascend from 0 and are in the backend's memory.
struct SequenceSumsArgs {
  const float* x = nullptr;
  const int32_t* bounds = nullptr;  // [sequences + 1]
  int64_t sequences = 0;
  float* sums = nullptr;  // [sequences]
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_OPS_LOSSES_H_
