// Packs waiting sequences into one micro-batch for each rank, end to end and without padding.
#ifndef ISOBIT_TRAINER_BRIDGE_SCORER_PACKING_H_
#define ISOBIT_TRAINER_BRIDGE_SCORER_PACKING_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace isobit {

struct WaitingSequence {
  int64_t tokens = 1;          // at least 1
  int64_t scored = 1;          // tokens whose logprobs it asks for, in [1, tokens]
  std::vector<int32_t> pages;  // by PageNumbers
};

struct PackedBatch {
  // How many sequences it has: the first ones of the queue.
  size_t count = 0;
  // The sequences of each rank, ascending; a rank may have none.
  std::vector<std::vector<size_t>> ranks;
  // Tokens that all ranks together compute.
  int64_t rows = 0;
};

// Takes as many sequences as fit, in order and without skipping any, so that none starves, and
// balances what the ranks compute.
//
// A sequence costs a rank its tokens without the pages that the rank computes for another sequence
// already. A rank computes at most `max_batch_tokens` tokens and scores at most as many, or has one
// longer sequence alone. A sequence goes to the rank that it costs least; if it costs several the
// same, to the one of them that computes least so far, the first if still equal. First that decides
// how many sequences are taken. Then these are placed again, longest first, under the least limit
// for a rank's tokens, not below the longest sequence, that lets all of them fit: so sequences that
// begin alike stay together, unless that makes the fullest rank fuller. If no limit does, the first
// placement stays.
//
// Takes at least one sequence if there is any. A pure function of its arguments.
PackedBatch PackBatch(absl::Span<const WaitingSequence> sequences, int num_ranks,
                      int64_t max_batch_tokens);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_PACKING_H_
