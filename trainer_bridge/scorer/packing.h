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
  int64_t scored = 1;          // tokens whose logprobs are wanted, in [1, tokens]
  std::vector<int32_t> pages;  // by PageNumbers
};

struct PackedBatch {
  // The number of sequences; they are the first ones of the queue.
  size_t count = 0;
  // The sequences of each rank, ascending; a rank may have none.
  std::vector<std::vector<size_t>> ranks;
  // The tokens that all ranks together compute.
  int64_t rows = 0;
};

// Takes as many sequences as fit, in order and without skipping any, so that none starves, and
// balances the work of the ranks.
//
// A sequence costs a rank its tokens, less the pages that the rank already computes for another
// sequence. A rank computes at most `max_batch_tokens` tokens and scores at most as many; only a
// single longer sequence may exceed that. A sequence goes to the rank where it costs least; among
// several, to the one that computes least so far; among these, to the first. This decides how many
// sequences are taken. Then these are placed again, longest first, under the smallest limit of a
// rank's tokens that lets all of them fit, at least the longest sequence: so sequences that begin
// alike stay together, unless that makes the fullest rank fuller. If there is no such limit, the
// first placement stays.
//
// Takes at least one sequence if there is any. A pure function of its arguments.
PackedBatch PackBatch(absl::Span<const WaitingSequence> sequences, int num_ranks,
                      int64_t max_batch_tokens);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_PACKING_H_
