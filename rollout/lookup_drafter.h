// The drafter `lookup`: what followed the last time that the sequence's own text, prompt or
// completion, had its last tokens. For edits, quotations, code, and loops.
#ifndef ISOBIT_ROLLOUT_LOOKUP_DRAFTER_H_
#define ISOBIT_ROLLOUT_LOOKUP_DRAFTER_H_

#include <memory>

#include "rollout/drafter.h"

namespace isobit {

std::unique_ptr<Drafter> MakeLookupDrafter();

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_LOOKUP_DRAFTER_H_
