// Packs waiting sequences into one micro-batch for each rank, end to end and without padding.
#ifndef ISOBIT_TRAINER_BRIDGE_SCORER_PACKING_H_
#define ISOBIT_TRAINER_BRIDGE_SCORER_PACKING_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace isobit {

struct PackedBatch {
  // How many sequences it has: the first ones of the queue.
  size_t count = 0;
  // The sequences of each rank, ascending; a rank may have none.
  std::vector<std::vector<size_t>> ranks;
};

// Takes as many sequences as fit, in order and without skipping any, so that none starves, and
// balances their tokens over the ranks. A rank takes at most `max_batch_tokens` tokens, or one
// longer sequence alone. `lengths`: tokens of each waiting sequence, at least 1 each. Takes at
// least one sequence if there is any. A pure function of its arguments.
PackedBatch PackBatch(absl::Span<const int64_t> lengths, int num_ranks, int64_t max_batch_tokens);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_PACKING_H_
