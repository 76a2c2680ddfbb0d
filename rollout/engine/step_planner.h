// Plans a sequence's rows in a step, and what their logits are for: to draw the next token or to
// score a known one. Pure: no pages, no sampling state, no thread.
#ifndef ISOBIT_ROLLOUT_ENGINE_STEP_PLANNER_H_
#define ISOBIT_ROLLOUT_ENGINE_STEP_PLANNER_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/runtime/rank_executor.h"
#include "rollout/schedule/state_pool.h"

namespace isobit {

// The state of a sequence before a step. Its rows are its tokens from num_cached on: a whole
// prompt, one new token, or several. The row of the last certain token draws the next one.
struct SequenceWork {
  absl::Span<const int32_t> tokens;  // the known ones
  // Positions whose keys and values are in its pages, or will be once the steps in flight have
  // ended. Fewer than its tokens.
  int64_t num_cached = 0;
  // If >= 0, one more token follows `tokens`: request `fed_by` of the last launched step draws it.
  int32_t fed_by = -1;
  // How many of `tokens`, counted from the end, are scored. The row before each of them scores it
  // and must not be cached.
  int64_t num_scored = 0;
  // Tokens that may come next. Each has a row that draws; that draw counts if this guess and all
  // before it are right. Empty if fed_by >= 0.
  absl::Span<const int32_t> guesses{};
  SlotsOfStep slots{};
};

// The step's requests of a sequence: [first, first_draw) score, [first_draw, end) draw.
struct PlannedRequests {
  size_t first = 0;
  size_t first_draw = 0;
  size_t end = 0;
};

// Removes all sequences from the step, but keeps its allocated memory.
void ClearStep(ModelStep& step);

// Adds the sequence's rows and requests to the step. Sets only `target` of a request. `pages`: the
// page table, for the rows and for what is cached. The rows are cut where work.slots says so.
PlannedRequests PlanSequence(const SequenceWork& work, const int32_t* pages, ModelStep& step);

// Adds one row at `position`, and the draw of what follows it. Its token is `id`, or, with fed_by
// >= 0, what request `fed_by` of the last launched step draws. Returns the draw's request.
size_t PlanRow(int32_t id, int32_t fed_by, int64_t position, const int32_t* pages,
               const SlotsOfStep& slots, ModelStep& step);

// For a sequence whose tokens equal those of the sequence added last: adds one more draw from the
// last row, but no row. Returns its request.
size_t PlanDrawFromLastRow(ModelStep& step);

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_ENGINE_STEP_PLANNER_H_
