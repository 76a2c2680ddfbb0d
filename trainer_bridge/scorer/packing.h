// Divides waiting sequences over ranks: each rank gets one micro-batch, whose sequences lie end to
// end without padding.
#ifndef ISOBIT_TRAINER_BRIDGE_SCORER_PACKING_H_
#define ISOBIT_TRAINER_BRIDGE_SCORER_PACKING_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace isobit {

struct PackedBatch {
  // The first `count` sequences are in it.
  size_t count = 0;
  // The sequences of each rank, ascending; a rank may have none.
  std::vector<std::vector<size_t>> ranks;
};

// Takes as many sequences as fit, in order and without skipping any, so that none waits for ever,
// and balances their tokens over the ranks. A rank takes at most `max_batch_tokens` tokens, or one
// sequence alone if that is longer. `lengths`: tokens of each waiting sequence, at least 1 each. At
// least one is taken if there is any. A pure function of its arguments.
PackedBatch PackBatch(absl::Span<const int64_t> lengths, int num_ranks, int64_t max_batch_tokens);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_PACKING_H_
