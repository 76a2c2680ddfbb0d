// Fills a ModelStep from scheduled sequences, and commits its results.
#include "rollout/engine/step_pipeline.h"

#include <iterator>
#include <utility>

#include "common/base/check.h"
#include "rollout/engine/step_planner.h"
#include "rollout/schedule/readiness.h"

namespace isobit {
namespace {

// Adds the row of the sequence's last token or candidate, which the contract will compute again.
void AddCandidate(Sequence& sequence, const SlotsOfStep& slots, ModelStep& step) {
  const std::vector<int32_t>& candidates = sequence.candidates;
  const auto behind = static_cast<uint32_t>(candidates.size()) + sequence.num_pending;
  const int64_t position = static_cast<int64_t>(sequence.tokens.size()) + behind - 1;
  const int32_t last = candidates.empty() ? sequence.tokens.back() : candidates.back();
  const int32_t fed_by = sequence.num_pending > 0 ? sequence.last_draw : -1;
  const size_t index = PlanRow(last, fed_by, position, sequence.state.data(), slots, step);
  LogProbRequest& draw = step.requests[index];
  SequenceSampling& sampling = *sequence.sampling;
  draw.sampling =
      sampling.needs_counts() ? sampling.RowBehind(candidates) : sampling.NextRow(behind);
  sequence.last_draw = static_cast<int32_t>(index);
  ++sequence.num_pending;
  ++sequence.num_pending_candidates;
}

// Adds the sequence's next row or rows and its draws, of which it returns the number: one, and one
// behind each guess.
size_t AddToStep(Sequence& sequence, const SlotsOfStep& slots, ModelStep& step) {
  const Request& request = *sequence.request;
  const bool fed = sequence.num_pending > 0;
  size_t index = 0;
  if (!fed && sequence.num_cached == static_cast<int64_t>(sequence.tokens.size())) {
    index = PlanDrawFromLastRow(step);
  } else {
    index = PlanSequence({.tokens = sequence.tokens,
                          .num_cached = sequence.num_cached,
                          .fed_by = fed ? sequence.last_draw : -1,
                          .guesses = sequence.guesses,
                          .slots = slots},
                         sequence.state.data(), step)
                .first_draw;
    sequence.num_cached += NumRows(sequence);
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
  step.model.variant = scheduled.provisional;
  step.num_draws.clear();
  step.is_candidate.clear();
  for (size_t i = 0; i < scheduled.sequences.size(); ++i) {
    Sequence* const sequence = scheduled.sequences[i];
    const SlotsOfStep& slots = scheduled.slots[i];
    if (sequence->sampling == nullptr) {
      sequence->request->BeginSampling(*sequence, eos_token_ids_);
    }
    step.is_candidate.push_back(DrawsCandidate(*sequence, scheduled.provisional));
    if (step.is_candidate.back()) {
      AddCandidate(*sequence, slots, step.model);
      step.num_draws.push_back(1);
    } else {
      step.num_draws.push_back(AddToStep(*sequence, slots, step.model));
    }
  }
  step.model.results.resize(step.model.requests.size());
  step.sequences = std::move(scheduled.sequences);
}

absl::Status StepPipeline::Collect() {
  ModelStep& step = SlotOf(num_collected_).model;
  step.is_awaited = depth_ > 1 && num_in_flight() == 1;
  return runner_.Collect(step);
}

void StepPipeline::Commit(RequestTable& table) {
  StepInFlight& step = SlotOf(num_collected_);
  absl::Span<LogProbResult> results = absl::MakeSpan(step.model.results);
  for (size_t i = 0; i < step.sequences.size(); ++i) {
    Sequence& sequence = *step.sequences[i];
    const absl::Span<LogProbResult> draws = results.first(step.num_draws[i]);
    results.remove_prefix(draws.size());
    if (sequence.phase == Sequence::Phase::kFinished) continue;
    if (step.is_candidate[i]) {
      table.CommitCandidate(sequence, draws[0]);
    } else {
      table.CommitDraws(sequence, draws);
    }
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
