// The limits of a rollout on GPUs for which no flag was given: from the model's shape and a rank's
// memory.
#ifndef ISOBIT_ROLLOUT_DEFAULT_LIMITS_H_
#define ISOBIT_ROLLOUT_DEFAULT_LIMITS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "common/checkpoint/model_config.h"

namespace isobit {

struct DefaultLimits {
  size_t max_running = 0;        // sequences in a step: 512 or a smaller power of two
  int64_t max_batch_tokens = 0;  // tokens in a step: 16384, or 8192 where memory is short
};

// rank_bytes: what each of tensor_parallel_size ranks may take of its GPU. So many sequences run
// that 1,024 tokens of each fill no more than half of what the weights leave; where prompts are
// shared, far longer ones fit. has_fast_path: the ranks keep their linear layers twice.
// INVALID_ARGUMENT: the ranks cannot share the model's heads equally.
absl::StatusOr<DefaultLimits> DefaultLimitsOf(const ModelConfig& config, int tensor_parallel_size,
                                              int64_t rank_bytes, bool has_fast_path = false);

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_DEFAULT_LIMITS_H_
