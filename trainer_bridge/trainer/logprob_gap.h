// The gap between sampler and trainer: whether a token's two logprobs have the same bits, and if
// not, how far apart they are. The comparator checks the same tokens again.
#ifndef ISOBIT_TRAINER_BRIDGE_TRAINER_LOGPROB_GAP_H_
#define ISOBIT_TRAINER_BRIDGE_TRAINER_LOGPROB_GAP_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "trainer_bridge/trainer/completion.h"

namespace isobit::trainer {

// The trainer's logprobs of each completion, one per token.
using Logprobs = std::vector<std::vector<float>>;

// Statistics over the tokens of a batch.
struct LogprobGap {
  int64_t tokens = 0;
  int64_t unequal = 0;       // tokens whose bits differ, or with a NaN
  int64_t impossible = 0;    // tokens with a logprob, on either side, that no drawn token can have
  double max_abs_dlogp = 0;  // infinite if a logprob is not finite
  double kl = 0;             // estimates KL(rollout || trainer): the mean of r - 1 - log r (k3)
  double kl_k1 = 0;          // the same KL by the mean of -log r
  double kl_k2 = 0;          // the same KL by the mean of (log r)^2 / 2
  std::string first{};  // the first unequal or impossible token's place and logprobs; else empty
};

// INVALID_ARGUMENT: `trainer` does not have one logprob per token.
absl::StatusOr<LogprobGap> FindGap(absl::Span<const Completion> completions,
                                   const Logprobs& trainer);

}  // namespace isobit::trainer

#endif  // ISOBIT_TRAINER_BRIDGE_TRAINER_LOGPROB_GAP_H_
