// Which rows a step computes for a sequence, and what the logits of some of them are for: to draw
// the next token, or to score one that is known. Pure: no pages, no sampling state, no thread.
#ifndef ISOBIT_ROLLOUT_STEP_PLANNER_H_
#define ISOBIT_ROLLOUT_STEP_PLANNER_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/runtime/rank_executor.h"

namespace isobit {

// A sequence as a step finds it. Its rows are all its tokens from num_cached on: a whole prompt,
// one new token, or several. The last token that is certain is followed by a draw.
struct SequenceWork {
  absl::Span<const int32_t> tokens;  // those known
  // Positions whose keys and values its pages have, or will have once the steps in flight have
  // ended. Fewer than its tokens.
  int64_t num_cached = 0;
  // >= 0: one more token follows `tokens`, which request `fed_by` of the step launched last draws.
  int32_t fed_by = -1;
  // Of the last of `tokens`: each is scored by the row before it, which must not be cached.
  int64_t num_scored = 0;
  // Tokens that may come next. Each is a row, too, and followed by a draw, which is what would be
  // drawn if all guesses up to it are right. None if fed_by >= 0.
  absl::Span<const int32_t> guesses{};
};

// The step's requests for a sequence: [first, first_draw) score, [first_draw, end) draw.
struct PlannedRequests {
  size_t first = 0;
  size_t first_draw = 0;
  size_t end = 0;
};

// Makes the step one without sequences, which keeps its memory.
void ClearStep(ModelStep& step);

// Adds the sequence's rows and requests to the step. Of a request only `target` is set. `pages`: of
// its rows and of what is cached.
PlannedRequests PlanSequence(const SequenceWork& work, const int32_t* pages, ModelStep& step);

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_STEP_PLANNER_H_
