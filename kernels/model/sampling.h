// Makes the RowSampling of a sequence's next position from sampling parameters and its tokens.
// Rollout and scorer both make their rows here, so that a scored logprob has the same meaning as
// the sampled one.
#ifndef ISOBIT_KERNELS_MODEL_SAMPLING_H_
#define ISOBIT_KERNELS_MODEL_SAMPLING_H_

#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

#include "absl/types/span.h"
#include "common/config/sampling_params.h"
#include "kernels/ops/log_probs.h"

namespace isobit {

// One sequence's sampling state. Append each completion token after its row has been processed.
class SequenceSampling {
 public:
  // eos_token_ids: the model's. They stop the sequence unless params.ignore_eos, and in any case
  // cannot be drawn before min_tokens. seed: the one to use. sample: the index among n.
  SequenceSampling(const SamplingParams& params, absl::Span<const int32_t> eos_token_ids,
                   uint64_t seed, uint32_t sample, absl::Span<const int32_t> prompt);

  // The row for the next token, or for the token `ahead` positions later; the latter requires
  // !needs_counts(), and that no token in between stops the sequence. Its spans point into this
  // object: `counts` is valid until the next Append, the others as long as the object.
  RowSampling NextRow(uint32_t ahead = 0) const;
  // The row for the token behind `guesses`, as if they had been appended. If one of them stops the
  // sequence, the row is useless. Its spans are valid as long as NextRow's.
  RowSampling RowBehind(absl::Span<const int32_t> guesses);
  void Append(int32_t token);

  // Whether drawing `token` ends the sequence. Stop tokens cannot be drawn before min_tokens.
  bool IsStop(int32_t token) const;
  uint32_t num_completion_tokens() const { return num_completion_; }
  // Whether rows depend on earlier tokens, because there are penalties.
  bool needs_counts() const { return counts_needed_; }

 private:
  void Count(int32_t token, bool in_prompt);

  RowSampling row_;  // all but spans, position and bans
  uint32_t min_tokens_;
  uint32_t num_prompt_;
  uint32_t num_completion_ = 0;
  bool counts_needed_;
  std::vector<int32_t> stop_ids_;    // sorted, each id once
  std::vector<int32_t> barred_ids_;  // stop_ids_ and the model's EOS ids, which are banned before
                                     // min_tokens; sorted, each id once
  std::vector<TokenBias> biases_;
  std::vector<TokenCount> counts_;
  std::unordered_map<int32_t, size_t> count_of_;        // id -> index in counts_
  std::deque<std::vector<TokenCount>> guessed_counts_;  // of RowBehind
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_SAMPLING_H_
