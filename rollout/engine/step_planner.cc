// Rows, requests and positions, added to a step.
#include "rollout/engine/step_planner.h"

#include "common/base/check.h"

namespace isobit {
namespace {

constexpr int32_t kAnyId = 0;  // stands for the token that the previous step draws
constexpr int32_t kDraw = -1;  // LogProbRequest::target

void AddRequest(int64_t row, int32_t target, ModelStep& step) {
  step.logit_rows.push_back(row);
  step.requests.emplace_back().target = target;
}

}  // namespace

void ClearStep(ModelStep& step) {
  step.page_copies.clear();
  step.batch.ids.clear();
  step.batch.sequences.clear();
  step.batch.writes_past = false;
  step.feeds.clear();
  step.logit_rows.clear();
  step.requests.clear();
  step.variant = false;
  step.times = {};
}

PlannedRequests PlanSequence(const SequenceWork& work, const int32_t* pages, ModelStep& step) {
  std::vector<int32_t>& ids = step.batch.ids;
  const bool fed = work.fed_by >= 0;
  const auto num_known = static_cast<int64_t>(work.tokens.size());
  const int64_t num_certain = num_known + (fed ? 1 : 0);
  ISOBIT_CHECK(work.num_cached < num_certain && (!fed || work.num_cached == num_known))
      << work.num_cached << " of " << num_certain << " tokens cached";
  ISOBIT_CHECK(work.num_scored == 0 || work.num_cached < num_known - work.num_scored)
      << "the row before a scored token is cached";
  ISOBIT_CHECK(!fed || work.guesses.empty()) << "guesses after a token that is not known";

  const auto first_row = static_cast<int64_t>(ids.size());
  ids.insert(ids.end(), work.tokens.begin() + work.num_cached, work.tokens.end());
  if (fed) ids.push_back(kAnyId);
  ids.insert(ids.end(), work.guesses.begin(), work.guesses.end());
  const auto end_row = static_cast<int64_t>(ids.size());
  SequenceRows rows = {.first_row = first_row,
                       .num_rows = end_row - first_row,
                       .first_position = work.num_cached,
                       .pages = pages,
                       .from_slot = work.slots.from,
                       .to_slot = work.slots.to};
  if (work.slots.cut_slot != kNoSlot) {
    const int64_t cut = work.slots.cut - work.num_cached;
    ISOBIT_CHECK(!fed && 0 < cut && cut < rows.num_rows) << "a cut behind " << cut << " rows";
    SequenceRows first = rows;
    first.num_rows = cut;
    first.to_slot = rows.from_slot = work.slots.cut_slot;
    step.batch.sequences.push_back(first);
    step.feeds.push_back(-1);
    step.batch.writes_past = true;
    rows.first_row += cut;
    rows.num_rows -= cut;
    rows.first_position += cut;
  }
  step.batch.sequences.push_back(rows);
  step.feeds.push_back(work.fed_by);

  PlannedRequests planned = {.first = step.requests.size()};
  const int64_t last_certain = first_row + num_certain - work.num_cached - 1;
  for (int64_t i = work.num_scored; i > 0; --i) {
    AddRequest(last_certain - i, work.tokens[static_cast<size_t>(num_known - i)], step);
  }
  planned.first_draw = step.requests.size();
  for (int64_t row = last_certain; row < end_row; ++row) AddRequest(row, kDraw, step);
  planned.end = step.requests.size();
  return planned;
}

size_t PlanRow(int32_t id, int32_t fed_by, int64_t position, const int32_t* pages,
               const SlotsOfStep& slots, ModelStep& step) {
  const auto row = static_cast<int64_t>(step.batch.ids.size());
  step.batch.ids.push_back(fed_by >= 0 ? kAnyId : id);
  step.batch.sequences.push_back({.first_row = row,
                                  .num_rows = 1,
                                  .first_position = position,
                                  .pages = pages,
                                  .from_slot = slots.from,
                                  .to_slot = slots.to});
  step.feeds.push_back(fed_by);
  AddRequest(row, kDraw, step);
  return step.requests.size() - 1;
}

size_t PlanDrawFromLastRow(ModelStep& step) {
  ISOBIT_CHECK(!step.requests.empty() && step.requests.back().target == kDraw)
      << "no draw to repeat";
  AddRequest(step.logit_rows.back(), kDraw, step);
  return step.requests.size() - 1;
}

}  // namespace isobit
