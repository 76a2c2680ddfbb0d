// The drafter `history`: guesses what other samples of the prompt have drawn at this point, under
// any weights, or what the client has sent along (draft_token_ids). For groups of samples, for
// prompts that come again after each update, and for replays.
#ifndef ISOBIT_ROLLOUT_GUESSES_HISTORY_DRAFTER_H_
#define ISOBIT_ROLLOUT_GUESSES_HISTORY_DRAFTER_H_

#include <cstddef>
#include <memory>

#include "rollout/schedule/drafter.h"

namespace isobit {

// max_bytes: bound of all texts together, as in HistoryStore.
std::unique_ptr<Drafter> MakeHistoryDrafter(size_t max_bytes);

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_GUESSES_HISTORY_DRAFTER_H_
