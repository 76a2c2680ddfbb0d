// Whether a running sequence can take part in the next step, and whether that step should wait for
// the one in flight. Pure functions of the sequences.
#ifndef ISOBIT_ROLLOUT_SCHEDULE_READINESS_H_
#define ISOBIT_ROLLOUT_SCHEDULE_READINESS_H_

#include <cstdint>

#include "absl/types/span.h"
#include "rollout/schedule/request.h"

namespace isobit {

enum class Readiness {
  kReady,        // its tokens are known
  kFed,          // the step in flight draws its last token, which stays on the device
  kAwaitsToken,  // its last token is in flight, and its penalties or its guesser need it
  kAwaitsDraft,  // its last token is in flight, and guesses will follow it
  kEnding,       // it needs no further step
  kHeld,         // its guesser holds it until its candidates are verified
};
Readiness ReadinessOf(const Sequence& sequence);

// Whether the next step should wait for the step in flight: if no sequence can go on before that
// step ends, and a sequence waits for it. Otherwise two groups of sequences would alternate from
// then on, each at half the speed.
bool ShouldWait(absl::Span<Sequence* const> running);

// Whether what a step draws for the sequence is a candidate: the step is provisional, or an earlier
// one was that drew the tokens before.
bool DrawsCandidate(const Sequence& sequence, bool provisional);
// Whether candidates follow its tokens, pending or not.
bool HasCandidates(const Sequence& sequence);

// The rows that a step computes for the sequence, besides those of guesses. A running sequence has
// one, or more if it could not be returned to its last right guess (StatePool::Return).
int64_t NumRows(const Sequence& sequence);

// Tokens and candidates, pending ones included.
int64_t NumTokens(const Sequence& sequence);
// The most tokens that the sequence can ever have.
int64_t MaxTokens(const Sequence& sequence);

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SCHEDULE_READINESS_H_
