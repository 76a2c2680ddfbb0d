// A backend that computes almost what the contract says, for tests of what must not depend on it.
#ifndef ISOBIT_TESTS_ROLLOUT_GUESSES_NOISY_OPS_H_
#define ISOBIT_TESTS_ROLLOUT_GUESSES_NOISY_OPS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "common/base/status_macros.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/support/forwarding_backend.h"

namespace isobit {

// Adds noise to partial sums and logits, which changes hidden states, keys, values and draws.
class NoisyOps final : public testing_support::ForwardingBackend {
 public:
  explicit NoisyOps(float noise) : ForwardingBackend(MakeCpuBackend(CpuOptions())), noise_(noise) {
    Replace<LinearArgs>(*this);
  }

  absl::Status On(const LinearArgs& a) {
    ISOBIT_RETURN_IF_ERROR(inner().Run(a));
    if (a.fp32_out == nullptr) return absl::OkStatus();
    for (int64_t row = 0; row < a.m; ++row) {
      for (int64_t i = 0; i < a.weight.shape.n; ++i) {
        state_ = state_ * 6364136223846793005u + 1442695040888963407u;
        const auto sign = static_cast<float>(static_cast<int32_t>(state_ >> 32)) / 2147483648.0f;
        a.fp32_out[row * a.ldy + i] += noise_ * sign;
      }
    }
    return absl::OkStatus();
  }

 private:
  const float noise_;
  uint64_t state_ = 1;
};

}  // namespace isobit

#endif  // ISOBIT_TESTS_ROLLOUT_GUESSES_NOISY_OPS_H_
