// Acceptances by request, drafts in flight, and the comparison with what was drawn.
#include "rollout/schedule/speculation.h"

#include <algorithm>
#include <utility>

#include "common/base/check.h"

namespace isobit {
namespace {

// How fast a sequence's acceptance follows its latest draft, and a guess that was only compared.
constexpr double kWeight = 0.25;
constexpr double kWeightOfOne = 0.1;
// And its client's either of them.
constexpr double kClientWeight = 1.0 / 32;
constexpr double kFirstAcceptance = 0.75;  // of a client of whom nothing is known
constexpr double kLeastPromise = 0.1;      // tokens by guesses; less are not worth the trouble
// Clients beyond are forgotten, all at once: what is known of one is soon learnt again.
constexpr size_t kMostClients = 4096;

void Increase(std::atomic<int64_t>& count, size_t by) {
  count.store(count.load(std::memory_order_relaxed) + static_cast<int64_t>(by),
              std::memory_order_relaxed);
}

std::vector<std::unique_ptr<Drafter>> MakeDrafters(const SpeculationOptions& options) {
  ISOBIT_CHECK(options.max_guesses >= 1 && options.max_guesses <= kMaxGuesses)
      << options.max_guesses << " guesses, expected 1 to " << kMaxGuesses;
  return options.make_drafters ? options.make_drafters() : std::vector<std::unique_ptr<Drafter>>();
}

}  // namespace

Speculation::Speculation(const SpeculationOptions& options, size_t max_running)
    : max_guesses_(options.max_guesses),
      table_(options.costs, max_running, options.max_guesses),
      drafters_(MakeDrafters(options)),
      counts_(drafters_.size()) {}

Speculation::Acceptances& Speculation::AcceptancesOf(const std::string& client) {
  const auto known = clients_.find(client);
  if (known != clients_.end()) return known->second;
  if (clients_.size() == kMostClients) clients_.clear();
  return clients_[client] = Acceptances(drafters_.size(), kFirstAcceptance);
}

SequenceDraft* Speculation::DraftOf(Sequence& sequence) {
  if (drafters_.empty() || !sequence.request->speculate) return nullptr;
  if (sequence.draft == nullptr) {
    sequence.draft = std::make_unique<SequenceDraft>();
    const Acceptances& acceptances = AcceptancesOf(sequence.request->client);
    for (size_t d = 0; d < drafters_.size(); ++d) {
      sequence.draft->records.push_back(
          {.drafter = drafters_[d]->Begin(sequence), .acceptance = acceptances[d]});
    }
  }
  return sequence.draft.get();
}

void Speculation::Learn(const Sequence& sequence, size_t drafter, double share, double weight) {
  double& of_client = AcceptancesOf(sequence.request->client)[drafter];
  of_client += kClientWeight * (share - of_client);
  if (sequence.draft == nullptr) return;  // it has ended
  double& own = sequence.draft->records[drafter].acceptance;
  own += weight * (share - own);
}

void Speculation::Compare(const Sequence& sequence) {
  std::vector<DrafterRecord>& records = sequence.draft->records;
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

void Speculation::Expect(Sequence& sequence, size_t num_running, size_t most) {
  SequenceDraft* const draft = DraftOf(sequence);
  if (draft == nullptr) return;
  Compare(sequence);
  draft->is_expected = false;
  if (table_.Guesses(num_running, 1.0) == 0) return;
  for (DrafterRecord& record : draft->records) {
    if (record.drafter == nullptr) continue;
    draft->num_guesses = std::min(table_.Guesses(num_running, record.acceptance), most);
    // Nothing comes of it unless the pending token is the one that is guessed for it.
    draft->promise = record.acceptance * GuessTable::Promise(draft->num_guesses, record.acceptance);
    // The pending token's, and the next one's.
    GuessToCompare(record, sequence, draft->num_guesses > 0 ? 2 : 1);
    draft->is_expected = scratch_.size() == 2;
    if (draft->is_expected) return;
  }
}

void Speculation::Draft(Sequence& sequence, size_t num_running, size_t most) {
  SequenceDraft* const draft = DraftOf(sequence);
  if (draft == nullptr) return;
  Compare(sequence);
  draft->is_expected = false;
  if (table_.Guesses(num_running, 1.0) == 0) return;
  for (size_t d = 0; d < draft->records.size(); ++d) {
    DrafterRecord& record = draft->records[d];
    if (record.drafter == nullptr) continue;
    const size_t guesses = std::min(table_.Guesses(num_running, record.acceptance), most);
    if (guesses == 0) {
      GuessToCompare(record, sequence, 1);
      continue;
    }
    record.drafter->Guess(sequence.tokens, guesses, sequence.guesses);
    draft->drafter = d;
    draft->num_guesses = sequence.guesses.size();
    draft->promise = GuessTable::Promise(draft->num_guesses, record.acceptance);
    if (!sequence.guesses.empty()) return;
  }
}

void Speculation::Weigh(const std::vector<Sequence*>& sequences, size_t num_sequences, bool sit_out,
                        size_t room) {
  size_t guesses = 0;
  double tokens = 0.0;
  for (Sequence* sequence : sequences) {
    const SequenceDraft& draft = *sequence->draft;
    const double promise = draft.promise - (sit_out ? 1.0 : 0.0);
    if (promise < kLeastPromise || draft.num_guesses > room - guesses) {
      TakeBack(*sequence);
    } else {
      guesses += draft.num_guesses;
      tokens += promise;
    }
  }
  if (guesses == 0 || table_.Pay(num_sequences, guesses, tokens)) return;
  for (Sequence* sequence : sequences) TakeBack(*sequence);
}

void Speculation::TakeBack(Sequence& sequence) {
  SequenceDraft& draft = *sequence.draft;
  draft.is_expected = false;
  if (sequence.guesses.empty()) return;
  DrafterRecord& record = draft.records[draft.drafter];
  record.compared_guess = sequence.guesses[0];
  record.compared_place = sequence.tokens.size();
  sequence.guesses.clear();
}

void Speculation::Settle(const Sequence& sequence, size_t drafter, const DraftResult& result) {
  DraftCounts& counts = counts_[drafter];
  Increase(counts.drafts, 1);
  Increase(counts.draft_tokens, result.guesses);
  for (size_t i = 0; i < result.accepted; ++i) Increase(counts.accepted[i], 1);
  const size_t tried = std::min(result.right + 1, result.guesses);
  Learn(sequence, drafter, static_cast<double>(result.right) / static_cast<double>(tried), kWeight);
}

void Speculation::End(Sequence& sequence) {
  if (sequence.sampling != nullptr && sequence.request->speculate) {
    for (const auto& drafter : drafters_) drafter->End(sequence);
  }
  sequence.draft = nullptr;
}

}  // namespace isobit
