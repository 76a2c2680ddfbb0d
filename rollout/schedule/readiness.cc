// Reads a sequence's readiness from its pending tokens and its turn.
#include "rollout/schedule/readiness.h"

#include <cstddef>

namespace isobit {

Readiness ReadinessOf(const Sequence& sequence) {
  const bool pending = sequence.num_pending > 0;
  if (sequence.turn == Sequence::Turn::kHeld) {
    return pending ? Readiness::kAwaitsToken : Readiness::kHeld;
  }
  if (!pending) return Readiness::kReady;
  if (NumTokens(sequence) >= MaxTokens(sequence)) return Readiness::kEnding;
  if (sequence.sampling->needs_counts()) return Readiness::kAwaitsToken;
  const bool drafts = !sequence.guesses.empty() || sequence.turn == Sequence::Turn::kAwaitsDraft;
  return drafts ? Readiness::kAwaitsDraft : Readiness::kFed;
}

bool ShouldWait(absl::Span<Sequence* const> running) {
  size_t fed = 0;
  size_t drafts = 0;
  size_t tokens = 0;
  for (const Sequence* sequence : running) {
    const Readiness readiness = ReadinessOf(*sequence);
    fed += readiness == Readiness::kFed ? 1 : 0;
    drafts += readiness == Readiness::kAwaitsDraft ? 1 : 0;
    tokens += readiness == Readiness::kAwaitsToken ? 1 : 0;
  }
  if (fed == 0) return drafts + tokens > 0;
  return drafts > 0 && 2 * drafts >= fed;
}

bool DrawsCandidate(const Sequence& sequence, bool provisional) {
  if (!sequence.request->deterministic || !sequence.guesses.empty()) return false;
  return provisional || HasCandidates(sequence);
}

bool HasCandidates(const Sequence& sequence) {
  return !sequence.candidates.empty() || sequence.num_pending_candidates > 0;
}

int64_t NumRows(const Sequence& sequence) {
  if (HasCandidates(sequence)) return 1;
  return static_cast<int64_t>(sequence.tokens.size()) + sequence.num_pending - sequence.num_cached;
}

int64_t NumTokens(const Sequence& sequence) {
  return static_cast<int64_t>(sequence.tokens.size() + sequence.candidates.size()) +
         sequence.num_pending;
}

int64_t MaxTokens(const Sequence& sequence) {
  const Request& request = *sequence.request;
  return int64_t{request.num_prompt_tokens} + request.max_tokens;
}

}  // namespace isobit
