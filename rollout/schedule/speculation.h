// Speculation: which sequences get guesses in the next step, from which drafter and how many, and
// which of them were right. Not here: the rows that guesses compute (step_planner.h), and why they
// change no bit (request_table.h).
#ifndef ISOBIT_ROLLOUT_SCHEDULE_SPECULATION_H_
#define ISOBIT_ROLLOUT_SCHEDULE_SPECULATION_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "rollout/schedule/drafter.h"
#include "rollout/schedule/guess_table.h"
#include "rollout/schedule/request.h"

namespace isobit {

// Bound of a sequence's guesses in a step. Also bounds the number of metric labels.
inline constexpr size_t kMaxGuesses = 16;

struct SpeculationOptions {
  // Makes the drafters. A sequence takes guesses of the first that has any. Null: no speculation.
  std::function<std::vector<std::unique_ptr<Drafter>>()> make_drafters;
  size_t max_guesses = 8;  // of a sequence in a step, 1 to kMaxGuesses
  StepCosts costs = CpuStepCosts();
};

// Counts of one drafter since the start. One thread writes them, any may read them.
struct DraftCounts {
  std::atomic<int64_t> drafts = 0;  // steps of a sequence with at least one guess
  std::atomic<int64_t> draft_tokens = 0;
  // [i]: drafts whose guess i brought one more token.
  std::array<std::atomic<int64_t>, kMaxGuesses> accepted{};
};

// The outcome of a sequence's guesses in a step.
struct DraftResult {
  size_t guesses = 0;
  size_t right = 0;  // leading guesses that became tokens
  size_t accepted =
      0;  // of them, those that brought one more token: all but an end of the sequence
};

// For the engine thread, except counts().
class Speculation {
 public:
  // max_running: sequences in a step.
  Speculation(const SpeculationOptions& options, size_t max_running);

  size_t num_drafters() const { return drafters_.size(); }
  size_t max_guesses() const { return max_guesses_; }
  const char* name(size_t drafter) const { return drafters_[drafter]->name(); }
  const DraftCounts& counts(size_t drafter) const { return counts_[drafter]; }

  // For a sequence whose last token a step in flight draws: decides whether it should wait for that
  // token, because there will probably be guesses, at most `most`, for what follows.
  void Expect(Sequence& sequence, size_t num_running, size_t most);

  // Adds at most `most` guesses to a sequence that has none and whose tokens are all known.
  void Draft(Sequence& sequence, size_t num_running, size_t most);

  // Undoes what Expect or Draft has set, unless it pays off in a step of num_sequences sequences
  // with room for `room` guesses. sit_out: these sequences miss a step that others take part in.
  void Weigh(const std::vector<Sequence*>& sequences, size_t num_sequences, bool sit_out,
             size_t room);

  void Settle(const Sequence& sequence, size_t drafter, const DraftResult& result);

  // Call before the tokens of an ending sequence are dropped.
  void End(Sequence& sequence);

 private:
  // Each drafter's recent acceptance for one client; new sequences begin with it. It is kept by
  // client, since otherwise response times would depend on what others ask.
  using Acceptances = std::vector<double>;

  Acceptances& AcceptancesOf(const std::string& client);
  // Null: no drafter may guess for it.
  SequenceDraft* DraftOf(Sequence& sequence);
  // Learns from compared guesses whose tokens are known by now.
  void Compare(const Sequence& sequence);
  // Guesses up to `most` tokens into scratch_; the first is to be compared once its token is known.
  void GuessToCompare(DrafterRecord& record, const Sequence& sequence, size_t most);
  static void TakeBack(Sequence& sequence);
  void Learn(const Sequence& sequence, size_t drafter, double share, double weight);

  const size_t max_guesses_;
  const GuessTable table_;
  std::vector<std::unique_ptr<Drafter>> drafters_;
  std::vector<DraftCounts> counts_;  // by drafter
  std::map<std::string, Acceptances> clients_;
  std::vector<int32_t> scratch_;
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SCHEDULE_SPECULATION_H_
