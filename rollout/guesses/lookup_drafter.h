// The drafter `lookup`: finds where the sequence's last tokens occurred before in its own prompt or
// completion, and guesses what followed there. For edits, quotations, code, and loops.
#ifndef ISOBIT_ROLLOUT_GUESSES_LOOKUP_DRAFTER_H_
#define ISOBIT_ROLLOUT_GUESSES_LOOKUP_DRAFTER_H_

#include <memory>

#include "rollout/schedule/drafter.h"

namespace isobit {

std::unique_ptr<Drafter> MakeLookupDrafter();

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_GUESSES_LOOKUP_DRAFTER_H_
