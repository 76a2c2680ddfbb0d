// The guesser that asks drafters: which sequences get guesses in the next step, from which drafter
// and how many, and which of them were right. Not here: the rows that guesses compute
// (step_planner.h), and why they change no bit (request_table.h).
#ifndef ISOBIT_ROLLOUT_GUESSES_SPECULATION_H_
#define ISOBIT_ROLLOUT_GUESSES_SPECULATION_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "rollout/guesses/drafter.h"
#include "rollout/guesses/guess_table.h"
#include "rollout/schedule/guesser.h"
#include "rollout/schedule/request.h"

namespace isobit {

// Bound of a sequence's guesses in a step. Also bounds the number of metric labels.
inline constexpr size_t kMaxGuesses = 16;

struct SpeculationOptions {
  // Makes the drafters. A sequence takes guesses of the first that has any.
  std::function<std::vector<std::unique_ptr<Drafter>>()> make_drafters;
  size_t max_guesses = 8;  // of a sequence in a step, 1 to kMaxGuesses
  StepCosts costs = CpuStepCosts();
};

// Counts of one drafter.
struct DrafterCounts : DraftCounts {
  // [i]: drafts whose guess i brought one more token.
  std::array<std::atomic<int64_t>, kMaxGuesses> accepted{};
};

class Speculation final : public Guesser {
 public:
  static MakeGuesser Maker(const SpeculationOptions& options);

  // max_running: sequences in a step.
  Speculation(const SpeculationOptions& options, size_t max_running);

  std::vector<Sequence*> Plan(absl::Span<Sequence* const> running, const GuessRoom& room) override;
  std::vector<Sequence*> Fill(absl::Span<Sequence* const> running, size_t num_going_on,
                              const GuessRoom& room, ScheduledStep& step) override;
  void Settle(const Sequence& sequence, const GuessResult& result) override;
  void Drop(size_t /*candidates*/) override {}
  void End(Sequence& sequence) override;
  GuesserInfo info() const override;

  const DrafterCounts& counts(size_t drafter) const { return counts_[drafter]; }

  // What Plan does for a sequence whose last token a step in flight draws: decides whether it
  // should wait for that token, because there will probably be guesses, at most `most`, for what
  // follows.
  void DecideToWait(Sequence& sequence, size_t num_running, size_t most);

  // Adds at most `most` guesses to a sequence that has none and whose tokens are all known.
  void Draft(Sequence& sequence, size_t num_running, size_t most);

  // Undoes what DecideToWait or Draft has set, unless it pays off in a step of num_sequences
  // sequences with room for `room` guesses. sit_out: these sequences miss a step that others take
  // part in.
  void KeepWorthwhile(const std::vector<Sequence*>& sequences, size_t num_sequences, bool sit_out,
                      size_t room);

  // The state of a sequence for which there have been guesses.
  static SequenceDraft& StateOf(const Sequence& sequence) {
    return *static_cast<SequenceDraft*>(sequence.draft.get());
  }

 private:
  // Each drafter's recent acceptance for one client; new sequences begin with it. It is kept by
  // client, since otherwise response times would depend on what others ask.
  using Acceptances = std::vector<double>;

  Acceptances& AcceptancesOf(const std::string& client);
  // Lets the sequence go on, and learns of its last guesses. Null: it gets no guesses among so many
  // sequences.
  SequenceDraft* DraftOf(Sequence& sequence, size_t num_running);
  // Learns from compared guesses whose tokens are known by now.
  void Compare(const Sequence& sequence);
  // Guesses up to `most` tokens into scratch_; the first is to be compared once its token is known.
  void GuessToCompare(DrafterRecord& record, const Sequence& sequence, size_t most);
  static void TakeBack(Sequence& sequence);
  void Learn(const Sequence& sequence, size_t drafter, double share, double weight);

  const size_t max_running_;
  const size_t max_guesses_;
  const GuessTable table_;
  std::vector<std::unique_ptr<Drafter>> drafters_;
  std::vector<DrafterCounts> counts_;  // by drafter
  std::map<std::string, Acceptances> clients_;
  std::vector<int32_t> scratch_;
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_GUESSES_SPECULATION_H_
