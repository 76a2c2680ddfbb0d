// See step_pipeline.h.
#include "rollout/step_pipeline.h"

#include <iterator>
#include <utility>

#include "common/base/check.h"
#include "rollout/step_planner.h"

namespace isobit {
namespace {

// Adds the sequence's next row or rows and its draws, of which it returns the number: one, and one
// behind each guess.
size_t AddToStep(Sequence& sequence, ModelStep& step) {
  const Request& request = *sequence.request;
  const bool fed = sequence.num_pending > 0;
  size_t index = 0;
  if (!fed && sequence.num_cached == static_cast<int64_t>(sequence.tokens.size())) {
    index = PlanDrawFromLastRow(step);
  } else {
    index = PlanSequence({.tokens = sequence.tokens,
                          .num_cached = sequence.num_cached,
                          .fed_by = fed ? sequence.last_draw : -1,
                          .guesses = sequence.guesses},
                         sequence.pages.data(), step)
                .first_draw;
    const auto guessed = static_cast<int64_t>(sequence.guesses.size());
    sequence.num_cached += step.batch.sequences.back().num_rows - guessed;
  }
  const absl::Span<const int32_t> guesses(sequence.guesses);
  for (size_t i = 0; i <= guesses.size(); ++i) {
    LogProbRequest& draw = step.requests[index + i];
    draw.sampling = guesses.empty() ? sequence.sampling->NextRow(sequence.num_pending)
                                    : sequence.sampling->RowBehind(guesses.first(i));
    draw.raw = request.raw_logprobs;
    draw.top_logprobs = static_cast<int32_t>(request.logprobs);
  }
  sequence.last_draw = static_cast<int32_t>(index);
  ++sequence.num_pending;
  return 1 + guesses.size();
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
  step.num_draws.clear();
  for (Sequence* sequence : scheduled.sequences) {
    if (sequence->sampling == nullptr) {
      sequence->request->BeginSampling(*sequence, eos_token_ids_);
    }
    step.num_draws.push_back(AddToStep(*sequence, step.model));
  }
  step.model.results.resize(step.model.requests.size());
  step.sequences = std::move(scheduled.sequences);
}

absl::Status StepPipeline::Collect() { return runner_.Collect(SlotOf(num_collected_).model); }

void StepPipeline::Commit(RequestTable& table) {
  StepInFlight& step = SlotOf(num_collected_);
  absl::Span<LogProbResult> results = absl::MakeSpan(step.model.results);
  for (size_t i = 0; i < step.sequences.size(); ++i) {
    Sequence& sequence = *step.sequences[i];
    const absl::Span<LogProbResult> draws = results.first(step.num_draws[i]);
    results.remove_prefix(draws.size());
    if (sequence.state == Sequence::State::kFinished) continue;
    table.CommitDraws(sequence, draws);
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
