// Learns how often each drafter is right, and gives guesses where they save time.
#include "rollout/guesses/speculation.h"

#include <algorithm>
#include <utility>

#include "common/base/check.h"
#include "common/base/round_up.h"
#include "rollout/schedule/readiness.h"
#include "rollout/schedule/scheduler.h"

namespace isobit {
namespace {

// How fast a sequence's acceptance follows its latest draft, and a guess that was only compared.
constexpr double kWeight = 0.25;
constexpr double kWeightOfOne = 0.1;
// And its client's either of them.
constexpr double kClientWeight = 1.0 / 32;
constexpr double kFirstAcceptance = 0.75;  // of a client of whom nothing is known
constexpr double kLeastTokens = 0.1;       // expected of guesses; less are not worth the trouble
// Clients beyond are forgotten, all at once: what is known of one is soon learnt again.
constexpr size_t kMostClients = 4096;

void Increase(std::atomic<int64_t>& count, size_t by) {
  count.store(count.load(std::memory_order_relaxed) + static_cast<int64_t>(by),
              std::memory_order_relaxed);
}

}  // namespace

MakeGuesser Speculation::Maker(const SpeculationOptions& options) {
  return
      [options](size_t max_running) { return std::make_unique<Speculation>(options, max_running); };
}

Speculation::Speculation(const SpeculationOptions& options, size_t max_running)
    : max_running_(max_running),
      max_guesses_(options.max_guesses),
      table_(options.costs, max_running, options.max_guesses),
      drafters_(options.make_drafters()),
      counts_(drafters_.size()) {
  ISOBIT_CHECK(max_guesses_ >= 1 && max_guesses_ <= kMaxGuesses)
      << max_guesses_ << " guesses, expected 1 to " << kMaxGuesses;
}

Speculation::Acceptances& Speculation::AcceptancesOf(const std::string& client) {
  const auto known = clients_.find(client);
  if (known != clients_.end()) return known->second;
  if (clients_.size() == kMostClients) clients_.clear();
  return clients_[client] = Acceptances(drafters_.size(), kFirstAcceptance);
}

SequenceDraft* Speculation::DraftOf(Sequence& sequence, size_t num_running) {
  sequence.turn = Sequence::Turn::kGoesOn;
  if (!sequence.request->speculate) return nullptr;
  if (sequence.draft == nullptr) {
    auto draft = std::make_shared<SequenceDraft>();
    const Acceptances& acceptances = AcceptancesOf(sequence.request->client);
    for (size_t d = 0; d < drafters_.size(); ++d) {
      draft->records.push_back(
          {.drafter = drafters_[d]->Begin(sequence), .acceptance = acceptances[d]});
    }
    sequence.draft = std::move(draft);
  }
  Compare(sequence);
  return table_.Guesses(num_running, 1.0) > 0 ? &StateOf(sequence) : nullptr;
}

void Speculation::Learn(const Sequence& sequence, size_t drafter, double share, double weight) {
  double& of_client = AcceptancesOf(sequence.request->client)[drafter];
  of_client += kClientWeight * (share - of_client);
  if (sequence.draft == nullptr) return;  // it has ended
  double& own = StateOf(sequence).records[drafter].acceptance;
  own += weight * (share - own);
}

void Speculation::Compare(const Sequence& sequence) {
  std::vector<DrafterRecord>& records = StateOf(sequence).records;
  for (size_t d = 0; d < records.size(); ++d) {
    if (records[d].compared_place >= sequence.tokens.size()) continue;
    const size_t place = std::exchange(records[d].compared_place, SIZE_MAX);
    const bool is_right = sequence.tokens[place] == records[d].compared_guess;
    Learn(sequence, d, is_right ? 1.0 : 0.0, kWeightOfOne);
  }
}

void Speculation::GuessToCompare(DrafterRecord& record, const Sequence& sequence, size_t most) {
  scratch_.clear();
  record.drafter->Guess(sequence.tokens, most, scratch_);
  if (scratch_.empty()) return;
  record.compared_guess = scratch_[0];
  record.compared_place = sequence.tokens.size();
}

std::vector<Sequence*> Speculation::Plan(absl::Span<Sequence* const> running,
                                         const GuessRoom& room) {
  const size_t most = room.pages > 0 ? max_running_ : 0;
  // Of the step after the one in flight. Those with guesses in flight will have as many again.
  size_t left = most - std::min(running.size(), most);
  for (const Sequence* sequence : running) {
    if (sequence->num_pending > 0) left -= std::min(sequence->guesses.size(), left);
  }
  std::vector<Sequence*> waiting;
  for (Sequence* sequence : running) {
    sequence->turn = Sequence::Turn::kGoesOn;
    if (ReadinessOf(*sequence) != Readiness::kFed) continue;
    DecideToWait(*sequence, running.size(), left);
    if (sequence->turn == Sequence::Turn::kAwaitsDraft) waiting.push_back(sequence);
  }
  KeepWorthwhile(waiting, running.size(), /*sit_out=*/!ShouldWait(running), left);
  return {};
}

std::vector<Sequence*> Speculation::Fill(absl::Span<Sequence* const> running, size_t num_going_on,
                                         const GuessRoom& room, ScheduledStep& step) {
  std::vector<Sequence*> drafted;
  int64_t rows = room.rows;
  int64_t pages = room.pages;
  for (size_t i = 0; i < num_going_on && rows > 0; ++i) {
    Sequence& sequence = *step.sequences[i];
    if (sequence.num_pending > 0) continue;
    const int64_t tokens = NumTokens(sequence);
    const auto own = static_cast<int64_t>(sequence.state.size());
    const int64_t most =
        std::min({rows, MaxTokens(sequence) - tokens - 1, (own + pages) * room.page_size - tokens});
    if (most <= 0) continue;
    Draft(sequence, running.size(), static_cast<size_t>(most));
    const auto guesses = static_cast<int64_t>(sequence.guesses.size());
    if (guesses == 0) continue;
    rows -= guesses;
    pages -= std::max<int64_t>(CeilDiv<int64_t>(tokens + guesses, room.page_size) - own, 0);
    drafted.push_back(&sequence);
  }
  // While this step is in flight, the sequences of the one that is in flight now may go on.
  const bool sit_out = std::ranges::any_of(running, [](const Sequence* sequence) {
    return sequence->num_pending > 0 && ReadinessOf(*sequence) != Readiness::kEnding;
  });
  KeepWorthwhile(drafted, num_going_on, sit_out, max_running_);
  std::erase_if(drafted, [](const Sequence* sequence) { return sequence->guesses.empty(); });
  return drafted;
}

void Speculation::DecideToWait(Sequence& sequence, size_t num_running, size_t most) {
  SequenceDraft* const draft = DraftOf(sequence, num_running);
  if (draft == nullptr) return;
  for (DrafterRecord& record : draft->records) {
    if (record.drafter == nullptr) continue;
    draft->num_guesses = std::min(table_.Guesses(num_running, record.acceptance), most);
    // Nothing comes of it unless the pending token is the one that is guessed for it.
    draft->expected_tokens =
        record.acceptance * GuessTable::ExpectedTokens(draft->num_guesses, record.acceptance);
    // The pending token's, and the next one's.
    GuessToCompare(record, sequence, draft->num_guesses > 0 ? 2 : 1);
    if (scratch_.size() < 2) continue;
    sequence.turn = Sequence::Turn::kAwaitsDraft;
    return;
  }
}

void Speculation::Draft(Sequence& sequence, size_t num_running, size_t most) {
  SequenceDraft* const draft = DraftOf(sequence, num_running);
  if (draft == nullptr) return;
  for (size_t d = 0; d < draft->records.size(); ++d) {
    DrafterRecord& record = draft->records[d];
    if (record.drafter == nullptr) continue;
    const size_t guesses = std::min(table_.Guesses(num_running, record.acceptance), most);
    if (guesses == 0) {
      GuessToCompare(record, sequence, 1);
      continue;
    }
    record.drafter->Guess(sequence.tokens, guesses, sequence.guesses);
    sequence.drafter = d;
    draft->num_guesses = sequence.guesses.size();
    draft->expected_tokens = GuessTable::ExpectedTokens(draft->num_guesses, record.acceptance);
    if (!sequence.guesses.empty()) return;
  }
}

void Speculation::KeepWorthwhile(const std::vector<Sequence*>& sequences, size_t num_sequences,
                                 bool sit_out, size_t room) {
  size_t guesses = 0;
  double tokens = 0.0;
  for (Sequence* sequence : sequences) {
    const SequenceDraft& draft = StateOf(*sequence);
    const double gain = draft.expected_tokens - (sit_out ? 1.0 : 0.0);
    if (gain < kLeastTokens || draft.num_guesses > room - guesses) {
      TakeBack(*sequence);
    } else {
      guesses += draft.num_guesses;
      tokens += gain;
    }
  }
  if (guesses == 0 || table_.IsWorthIt(num_sequences, guesses, tokens)) return;
  for (Sequence* sequence : sequences) TakeBack(*sequence);
}

void Speculation::TakeBack(Sequence& sequence) {
  sequence.turn = Sequence::Turn::kGoesOn;
  if (sequence.guesses.empty()) return;
  DrafterRecord& record = StateOf(sequence).records[sequence.drafter];
  record.compared_guess = sequence.guesses[0];
  record.compared_place = sequence.tokens.size();
  sequence.guesses.clear();
}

void Speculation::Settle(const Sequence& sequence, const GuessResult& result) {
  DrafterCounts& counts = counts_[sequence.drafter];
  Increase(counts.drafts, 1);
  Increase(counts.draft_tokens, result.guesses);
  Increase(counts.accepted_tokens, result.accepted);
  for (size_t i = 0; i < result.accepted; ++i) Increase(counts.accepted[i], 1);
  const size_t tried = std::min(result.right + 1, result.guesses);
  Learn(sequence, sequence.drafter, static_cast<double>(result.right) / static_cast<double>(tried),
        kWeight);
}

void Speculation::End(Sequence& sequence) {
  if (sequence.sampling != nullptr && sequence.request->speculate) {
    for (const auto& drafter : drafters_) drafter->End(sequence);
  }
  sequence.draft = nullptr;
}

GuesserInfo Speculation::info() const {
  GuesserInfo info;
  for (size_t d = 0; d < drafters_.size(); ++d) {
    const char* const name = drafters_[d]->name();
    info.drafters.emplace_back(name, &counts_[d]);
    for (size_t i = 0; i < max_guesses_; ++i) {
      info.more_counts.push_back({"isobit_spec_decode_num_accepted_tokens_per_pos_total",
                                  "Of them, those of guesses at that place in their draft.",
                                  {{"drafter", name}, {"position", std::to_string(i)}},
                                  &counts_[d].accepted[i]});
    }
  }
  return info;
}

}  // namespace isobit
