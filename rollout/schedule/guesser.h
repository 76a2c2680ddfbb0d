// The seam between the scheduler and whatever guesses what sequences draw next. A guess is a row
// more in a step: it can save steps, and changes no token. The scheduler decides who takes part in
// a step, and asks a guesser what to do with the room that is left. It does not know who guesses,
// nor how (rollout/guesses).
#ifndef ISOBIT_ROLLOUT_SCHEDULE_GUESSER_H_
#define ISOBIT_ROLLOUT_SCHEDULE_GUESSER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "rollout/schedule/request.h"

namespace isobit {

struct ScheduledStep;

// What a step has room for, beside the sequences that it has already.
struct GuessRoom {
  int64_t rows = 0;   // each with a draw
  int64_t pages = 0;  // free ones, less one for each running sequence, for its next token
  int32_t page_size = 0;
};

// What became of the guesses of a sequence in a step.
struct GuessResult {
  size_t guesses = 0;
  size_t right = 0;     // leading guesses that became tokens
  size_t accepted = 0;  // of them, those that brought one more token: all but one that ended it
};

// Counts since the start. One thread writes them, any may read them.
struct DraftCounts {
  std::atomic<int64_t> drafts = 0;  // steps of a sequence with at least one guess
  std::atomic<int64_t> draft_tokens = 0;
  std::atomic<int64_t> accepted_tokens = 0;  // that sequences got because of right guesses
};

// A count that only one guesser has, for metrics.
struct GuesserCount {
  const char* name;
  const char* help;
  std::map<std::string, std::string> labels;
  const std::atomic<int64_t>* value;
};

// Lives as long as the guesser.
struct GuesserInfo {
  // By name, as in --speculation.
  std::vector<std::pair<std::string, const DraftCounts*>> drafters;
  std::vector<GuesserCount> more_counts;
  // Rows of a sequence with which a step verifies candidates, and sequences that it verifies
  // together. 0: no step is provisional.
  size_t verify_window = 0;
  size_t verify_group = 0;
};

// Used by the engine thread alone, except info.
class Guesser {
 public:
  virtual ~Guesser() = default;

  // Before a step is chosen: sets Sequence::turn of every running sequence. Returns sequences to
  // which it has given guesses and which the step shall place first, even if others are preempted
  // for them. room: of the whole step.
  virtual std::vector<Sequence*> Plan(absl::Span<Sequence* const> running,
                                      const GuessRoom& room) = 0;

  // After the step's sequences have been chosen, of which the first num_going_on ran before: uses
  // the room that is left, and may make the step provisional. Returns sequences that now have
  // guesses, which fit; those that Plan has held join the step with them.
  virtual std::vector<Sequence*> Fill(absl::Span<Sequence* const> running, size_t num_going_on,
                                      const GuessRoom& room, ScheduledStep& step) = 0;

  // The guesses that a step has computed for the sequence, which may have ended.
  virtual void Settle(const Sequence& sequence, const GuessResult& result) = 0;

  // So many candidates (Sequence::candidates) were dropped, and were not verified.
  virtual void Drop(size_t candidates) = 0;

  // Call before the tokens of an ending sequence are dropped.
  virtual void End(Sequence& sequence) = 0;

  virtual GuesserInfo info() const = 0;
};

// max_running: as in SchedulerLimits. INVALID_ARGUMENT: it is too small.
using MakeGuesser = std::function<absl::StatusOr<std::unique_ptr<Guesser>>(size_t max_running)>;

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SCHEDULE_GUESSER_H_
