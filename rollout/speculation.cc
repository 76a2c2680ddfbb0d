// See speculation.h.
#include "rollout/speculation.h"

#include <algorithm>
#include <utility>

#include "common/base/check.h"

namespace isobit {
namespace {

// How fast a sequence's acceptance follows its latest draft, and its client's.
constexpr double kWeight = 0.25;
constexpr double kClientWeight = 1.0 / 32;
// Of a client of whom nothing is known, and how fast it goes to 1 with each sequence that begins.
constexpr double kFirstAcceptance = 0.75;
constexpr double kRise = 1.0 / 256;
// Clients beyond are forgotten, all at once: what is known of one is soon learnt again.
constexpr size_t kMostClients = 4096;
// A drafter that misses is asked again after 1, 2, 4, ... tokens, at most 2 to this power.
constexpr uint32_t kMostDoublings = 6;
// When it is asked again, for what it might do by now.
constexpr double kLeastAcceptance = 0.25;

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
    Acceptances& acceptances = AcceptancesOf(sequence.request->client);
    for (size_t d = 0; d < drafters_.size(); ++d) {
      acceptances[d] += kRise * (1.0 - acceptances[d]);
      sequence.draft->records.push_back(
          {.drafter = drafters_[d]->Begin(sequence), .acceptance = acceptances[d]});
    }
  }
  return sequence.draft.get();
}

void Speculation::Ask(DrafterRecord& record, const Sequence& sequence, size_t known, size_t most,
                      std::vector<int32_t>& guesses) const {
  if (record.drafter == nullptr || known < record.silent_until || most == 0) return;
  record.drafter->Guess(sequence.tokens, most, guesses);
}

bool Speculation::Expects(Sequence& sequence, size_t num_running) {
  SequenceDraft* const draft = DraftOf(sequence);
  if (draft == nullptr) return false;
  draft->is_expected = false;
  for (size_t d = 0; d < draft->records.size() && !draft->is_expected; ++d) {
    DrafterRecord& record = draft->records[d];
    const size_t most = table_.Guesses(num_running, std::max(record.acceptance, kLeastAcceptance));
    if (most == 0) continue;
    scratch_.clear();
    Ask(record, sequence, sequence.tokens.size() + 1, 2, scratch_);
    draft->drafter = d;
    draft->is_expected = scratch_.size() == 2;  // the pending token's and one more
  }
  return draft->is_expected;
}

void Speculation::Draft(Sequence& sequence, size_t num_running, size_t most) {
  SequenceDraft* const draft = DraftOf(sequence);
  if (draft == nullptr) return;
  const bool was_expected = std::exchange(draft->is_expected, false);
  const size_t expected = draft->drafter;
  for (size_t d = 0; d < draft->records.size() && sequence.guesses.empty(); ++d) {
    DrafterRecord& record = draft->records[d];
    const size_t guesses =
        table_.Guesses(num_running, std::max(record.acceptance, kLeastAcceptance));
    Ask(record, sequence, sequence.tokens.size(), std::min(guesses, most), sequence.guesses);
    draft->drafter = d;
  }
  if (was_expected && sequence.guesses.empty()) Miss(draft->records[expected], sequence);
}

void Speculation::Settle(const Sequence& sequence, size_t drafter, const DraftResult& result) {
  DraftCounts& counts = counts_[drafter];
  Increase(counts.drafts, 1);
  Increase(counts.draft_tokens, result.guesses);
  for (size_t i = 0; i < result.accepted; ++i) Increase(counts.accepted[i], 1);
  const size_t tried = std::min(result.right + 1, result.guesses);
  const double share = static_cast<double>(result.right) / static_cast<double>(tried);
  double& of_client = AcceptancesOf(sequence.request->client)[drafter];
  of_client += kClientWeight * (share - of_client);
  if (sequence.draft == nullptr) return;  // it has ended
  DrafterRecord& record = sequence.draft->records[drafter];
  record.acceptance += kWeight * (share - record.acceptance);
  if (result.right > 0) {
    record.misses = 0;
  } else {
    Miss(record, sequence);
  }
}

void Speculation::Miss(DrafterRecord& record, const Sequence& sequence) {
  record.silent_until =
      sequence.tokens.size() + (size_t{1} << std::min(record.misses++, kMostDoublings));
}

void Speculation::End(Sequence& sequence) {
  if (sequence.sampling != nullptr && sequence.request->speculate) {
    for (const auto& drafter : drafters_) drafter->End(sequence);
  }
  sequence.draft = nullptr;
}

}  // namespace isobit
