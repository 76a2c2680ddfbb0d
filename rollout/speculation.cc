// See speculation.h.
#include "rollout/speculation.h"

#include <algorithm>
#include <utility>

#include "common/base/check.h"

namespace isobit {
namespace {

// How fast a sequence's acceptance follows its latest draft.
constexpr double kWeight = 0.25;
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

SequenceDraft* Speculation::DraftOf(Sequence& sequence) {
  if (drafters_.empty() || !sequence.request->speculate) return nullptr;
  if (sequence.draft == nullptr) {
    sequence.draft = std::make_unique<SequenceDraft>();
    for (const auto& drafter : drafters_) {
      sequence.draft->records.push_back({.drafter = drafter->Begin(sequence)});
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

void Speculation::Settle(Sequence& sequence, size_t drafter, size_t guesses, size_t accepted) {
  DraftCounts& counts = counts_[drafter];
  Increase(counts.drafts, 1);
  Increase(counts.draft_tokens, guesses);
  for (size_t i = 0; i < accepted; ++i) Increase(counts.accepted[i], 1);
  if (sequence.draft == nullptr) return;  // it has ended
  DrafterRecord& record = sequence.draft->records[drafter];
  const size_t tried = std::min(accepted + 1, guesses);
  const double share = static_cast<double>(accepted) / static_cast<double>(tried);
  record.acceptance += kWeight * (share - record.acceptance);
  if (accepted > 0) {
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
