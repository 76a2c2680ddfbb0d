// The steps in flight, from launch to commit: what each computes, which of its tokens the step
// before it draws, and what must stay in memory until it ends. The Scheduler chooses the sequences.
#ifndef ISOBIT_ROLLOUT_ENGINE_STEP_PIPELINE_H_
#define ISOBIT_ROLLOUT_ENGINE_STEP_PIPELINE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "rollout/engine/model_runner.h"
#include "rollout/engine/request_table.h"
#include "rollout/schedule/scheduler.h"

namespace isobit {

// Used by the engine thread alone; no mutex guards it.
class StepPipeline {
 public:
  // Both outlive the object. eos_token_ids: the model's.
  StepPipeline(ModelRunner& runner, absl::Span<const int32_t> eos_token_ids);

  size_t num_in_flight() const { return num_launched_ - num_collected_; }
  bool is_full() const { return num_in_flight() == depth_; }

  // Plans rows and draws for the step's sequences and launches them. The pipeline must not be full.
  // Errors are those of the ranks, and final.
  absl::Status Launch(ScheduledStep scheduled);

  // Waits for the oldest step. Errors as for Launch.
  absl::Status Collect();
  // Device times of the oldest step. Call after Collect.
  const DeviceTimes& collected_times() const {
    return slots_[num_collected_ % slots_.size()].model.times;
  }
  // Appends the tokens of the oldest step, after Collect, to those of its sequences that still run,
  // as far as their guesses were right. The caller holds the engine's mutex, because it guards the
  // table.
  void Commit(RequestTable& table);
  // Forgets the oldest step and frees what only that step pointed to.
  void Retire();

  // Takes everything out of `ended` and keeps it until every step launched so far is retired.
  // INVARIANT: a step in flight may point into it (EngineTest.StepsInFlightOutliveTheirRequests).
  void Keep(EndedRequests& ended);

  // Call after a failure: no further step will be launched or collected. What the steps in flight
  // point to is kept.
  void Abandon() { num_collected_ = num_launched_; }

  // Waits for all steps in flight and forgets what they have drawn.
  void Drain();

 private:
  // A step, and the objects that `model` points to and that may end meanwhile.
  struct StepInFlight {
    ModelStep model;
    std::vector<Sequence*> sequences;  // that draw, in the order of model's requests; some may have
                                       // finished
    std::vector<size_t> num_draws;     // of each sequence
    std::vector<bool> is_candidate;    // of each sequence: its draw is to be verified
    EndedRequests ended;               // what ended while this was the last step launched
  };

  StepInFlight& SlotOf(uint64_t step) { return slots_[step % slots_.size()]; }
  void Prepare(ScheduledStep scheduled, StepInFlight& step) const;

  ModelRunner& runner_;
  const absl::Span<const int32_t> eos_token_ids_;
  const size_t depth_;                 // steps that can be in flight
  std::array<StepInFlight, 2> slots_;  // used in turn
  uint64_t num_launched_ = 0;
  uint64_t num_collected_ = 0;
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_ENGINE_STEP_PIPELINE_H_
