// Speculation: which sequences get guesses in the next step, from which drafter and how many, and
// what has become of them. What a guess's row computes, and that it changes no bit, is the step
// planner's and the request table's matter.
#ifndef ISOBIT_ROLLOUT_SPECULATION_H_
#define ISOBIT_ROLLOUT_SPECULATION_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "rollout/drafter.h"
#include "rollout/guess_table.h"
#include "rollout/request.h"

namespace isobit {

// Of a sequence in a step. Bounds the labels of metrics, too.
inline constexpr size_t kMaxGuesses = 16;

struct SpeculationOptions {
  // Makes the drafters; the first that has a guess for a sequence is taken. Null: no speculation.
  std::function<std::vector<std::unique_ptr<Drafter>>()> make_drafters;
  size_t max_guesses = 8;  // of a sequence in a step, 1 to kMaxGuesses
  StepCosts costs = CpuStepCosts();
};

// Of one drafter, since the start. Written by one thread, read by any.
struct DraftCounts {
  std::atomic<int64_t> drafts = 0;  // steps of a sequence with at least one guess
  std::atomic<int64_t> draft_tokens = 0;
  // [i]: drafts whose guess i brought its sequence one more token.
  std::array<std::atomic<int64_t>, kMaxGuesses> accepted{};
};

// What has become of the guesses of a sequence in a step.
struct DraftResult {
  size_t guesses = 0;
  size_t right = 0;  // the first ones, which became tokens
  size_t accepted =
      0;  // of them, those that brought one more token: all but an end of the sequence
};

// For the engine thread, except counts().
class Speculation {
 public:
  // max_running: sequences of a step.
  Speculation(const SpeculationOptions& options, size_t max_running);

  size_t num_drafters() const { return drafters_.size(); }
  size_t max_guesses() const { return max_guesses_; }
  const char* name(size_t drafter) const { return drafters_[drafter]->name(); }
  const DraftCounts& counts(size_t drafter) const { return counts_[drafter]; }

  // Sets whether a sequence, whose last token a step in flight draws, should wait for that token,
  // because there will probably be guesses, at most `most`, for what follows it.
  void Expect(Sequence& sequence, size_t num_running, size_t most);

  // Sets the guesses of a sequence that has none, at most `most`, all of whose tokens are known.
  void Draft(Sequence& sequence, size_t num_running, size_t most);

  // Takes back what Expect or Draft has set for these sequences, unless it pays in a step of
  // num_sequences, which has room for so many guesses. sit_out: they miss a step of the others.
  void Weigh(const std::vector<Sequence*>& sequences, size_t num_sequences, bool sit_out,
             size_t room);

  void Settle(const Sequence& sequence, size_t drafter, const DraftResult& result);

  // To be called before the tokens of a sequence that ends are dropped.
  void End(Sequence& sequence);

 private:
  // How well each drafter has done for a client lately. A new sequence begins with it. By client:
  // else the time of an answer would depend on what others ask.
  using Acceptances = std::vector<double>;

  Acceptances& AcceptancesOf(const std::string& client);
  // Null: no drafter may guess for it.
  SequenceDraft* DraftOf(Sequence& sequence);
  // Learns from the guesses that were to be compared with tokens which are known by now.
  void Compare(const Sequence& sequence);
  // Guesses up to `most` tokens into scratch_, the first of which is to be compared.
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

#endif  // ISOBIT_ROLLOUT_SPECULATION_H_
