// Plans a sequence's rows in a step, and what their logits are for: to draw the next token, or to
// score a known one. Pure: no pages, no sampling state, no thread.
#ifndef ISOBIT_ROLLOUT_STEP_PLANNER_H_
#define ISOBIT_ROLLOUT_STEP_PLANNER_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/runtime/rank_executor.h"

namespace isobit {

// A sequence as a step finds it. Its rows are its tokens from num_cached on: a whole prompt, one
// new token, or several. The row of the last certain token draws the next one.
struct SequenceWork {
  absl::Span<const int32_t> tokens;  // the known ones
  // Positions whose keys and values its pages have, or will have once the steps in flight have
  // ended. Fewer than its tokens.
  int64_t num_cached = 0;
  // >= 0: one more token follows `tokens`: request `fed_by` of the last launched step draws it.
  int32_t fed_by = -1;
  // How many of `tokens`, counted from the end, are scored. The row before each scores it, and must
  // not be cached.
  int64_t num_scored = 0;
  // Tokens that may come next. Each is a row that draws: its draw counts if all guesses up to it
  // are right. Empty if fed_by >= 0.
  absl::Span<const int32_t> guesses{};
};

// The step's requests for a sequence: [first, first_draw) score, [first_draw, end) draw.
struct PlannedRequests {
  size_t first = 0;
  size_t first_draw = 0;
  size_t end = 0;
};

// Removes all sequences from the step, which keeps its memory.
void ClearStep(ModelStep& step);

// Adds the sequence's rows and requests to the step. Sets only `target` of a request. `pages`: the
// sequence's page table, for its rows and for what is cached.
PlannedRequests PlanSequence(const SequenceWork& work, const int32_t* pages, ModelStep& step);

// Adds one row, of token `id` at `position`, or with fed_by >= 0 of the token that request `fed_by`
// of the last launched step draws; and the draw of what follows. Returns the draw's request.
size_t PlanRow(int32_t id, int32_t fed_by, int64_t position, const int32_t* pages, ModelStep& step);

// Adds the draw of a sequence that has no row in the step, because its tokens are those of the
// sequence added last: one more draw from the same row. Returns its request.
size_t PlanDrawFromLastRow(ModelStep& step);

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_STEP_PLANNER_H_
