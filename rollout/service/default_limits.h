// Default limits of a rollout on GPUs, for flags that were not given. They follow from the model's
// shape and a rank's memory.
#ifndef ISOBIT_ROLLOUT_SERVICE_DEFAULT_LIMITS_H_
#define ISOBIT_ROLLOUT_SERVICE_DEFAULT_LIMITS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "common/checkpoint/model_config.h"

namespace isobit {

struct DefaultLimits {
  size_t max_running = 0;        // sequences in a step: 512 or a smaller power of two
  int64_t max_batch_tokens = 0;  // tokens in a step: 16384, or 8192 where memory is short
};

// rank_bytes: what each rank may use of its GPU's memory. max_running is chosen so that 1,024
// tokens of every sequence fill at most half of what the weights leave free; with shared prompts,
// far longer sequences fit. linear_twice: the ranks keep their linear layers twice.
// INVALID_ARGUMENT: the ranks cannot share the model's heads equally.
absl::StatusOr<DefaultLimits> DefaultLimitsOf(const ModelConfig& config, int tensor_parallel_size,
                                              int64_t rank_bytes, bool linear_twice = false);

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SERVICE_DEFAULT_LIMITS_H_
