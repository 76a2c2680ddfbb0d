// See step_pipeline.h.
#include "rollout/step_pipeline.h"

#include <iterator>
#include <utility>

#include "common/base/check.h"
#include "rollout/step_planner.h"

namespace isobit {
namespace {

// Adds the sequence's next row or rows, and the draw of its next token.
void AddToStep(Sequence& sequence, ModelStep& step) {
  const Request& request = *sequence.request;
  const bool fed = sequence.num_pending > 0;
  size_t index = 0;
  if (!fed && sequence.num_cached == static_cast<int64_t>(sequence.tokens.size())) {
    index = PlanDrawFromLastRow(step);
  } else {
    index = PlanSequence({.tokens = sequence.tokens,
                          .num_cached = sequence.num_cached,
                          .fed_by = fed ? sequence.last_draw : -1},
                         sequence.pages.data(), step)
                .first_draw;
    sequence.num_cached += step.batch.sequences.back().num_rows;
  }
  LogProbRequest& draw = step.requests[index];
  draw.sampling = sequence.sampling->NextRow(sequence.num_pending);
  draw.raw = request.raw_logprobs;
  draw.top_logprobs = static_cast<int32_t>(request.logprobs);
  sequence.last_draw = static_cast<int32_t>(index);
  ++sequence.num_pending;
}

template <typename T>
void MoveAll(std::vector<T>& from, std::vector<T>& to) {
  to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
  from.clear();
}

}  // namespace

StepPipeline::StepPipeline(ModelRunner& runner, absl::Span<const int32_t> eos_token_ids)
    : runner_(runner), eos_token_ids_(eos_token_ids), depth_(static_cast<size_t>(runner.depth())) {
  ISOBIT_CHECK(depth_ >= 1 && depth_ <= slots_.size()) << "depth " << depth_;
}

absl::Status StepPipeline::Launch(ScheduledStep scheduled) {
  StepInFlight& step = SlotOf(num_launched_++);
  Prepare(std::move(scheduled), step);
  return runner_.Launch(step.model);
}

void StepPipeline::Prepare(ScheduledStep scheduled, StepInFlight& step) const {
  ClearStep(step.model);
  step.model.page_copies = std::move(scheduled.copies);
  step.model.batch.writes_past = scheduled.writes_past;
  for (Sequence* sequence : scheduled.sequences) {
    if (sequence->sampling == nullptr) {
      sequence->request->BeginSampling(*sequence, eos_token_ids_);
    }
    AddToStep(*sequence, step.model);
  }
  step.model.results.resize(step.model.requests.size());
  step.sequences = std::move(scheduled.sequences);
}

absl::Status StepPipeline::Collect() { return runner_.Collect(SlotOf(num_collected_).model); }

void StepPipeline::Commit(RequestTable& table) {
  StepInFlight& step = SlotOf(num_collected_);
  for (size_t i = 0; i < step.sequences.size(); ++i) {
    Sequence& sequence = *step.sequences[i];
    if (sequence.state == Sequence::State::kFinished) continue;
    table.CommitToken(sequence, step.model.results[i]);
  }
  table.CloseFinished(step.sequences);
}

void StepPipeline::Retire() { SlotOf(num_collected_++).ended.clear(); }

void StepPipeline::Keep(EndedRequests& ended) {
  if (num_in_flight() == 0) return ended.clear();
  EndedRequests& kept = SlotOf(num_launched_ - 1).ended;
  MoveAll(ended.requests, kept.requests);
  MoveAll(ended.samplings, kept.samplings);
}

void StepPipeline::Drain() {
  while (num_in_flight() > 0 && Collect().ok()) Retire();
}

}  // namespace isobit
