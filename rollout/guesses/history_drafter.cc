// The drafter `history`: guesses what other samples of the prompt have drawn at this point, under
// any weights, or what the client has sent along (draft_token_ids). For groups of samples, for
// prompts that come again after each update, and for replays.
#include <utility>

#include "rollout/guesses/drafters.h"
#include "rollout/guesses/history_store.h"
#include "rollout/schedule/request.h"

namespace isobit {
namespace {

class HistorySequence final : public SequenceDrafter {
 public:
  // own: a text to begin with, if it is there.
  HistorySequence(const std::shared_ptr<const PromptTexts>& texts, size_t num_prompt_tokens,
                  absl::Span<const int32_t> own)
      : texts_(texts), generation_(texts->generation()) {
    const size_t begin = texts->Find(own);
    if (begin > 0) follower_.Follow(begin, num_prompt_tokens);
  }

  void Guess(absl::Span<const int32_t> tokens, size_t most,
             std::vector<int32_t>& guesses) override {
    const std::shared_ptr<const PromptTexts> texts = texts_.lock();
    if (texts == nullptr) return;
    if (std::exchange(generation_, texts->generation()) != texts->generation()) follower_.Forget();
    const absl::Span<const int32_t> text = texts->text();
    follower_.Advance(text, texts->index(), tokens);
    const SuffixIndex::Place& place = follower_.place();
    if (place.length == 0) return;
    for (size_t i = 0; i < most && text[place.end + i] != kTextEnd; ++i) {
      guesses.push_back(text[place.end + i]);
    }
  }

 private:
  const std::weak_ptr<const PromptTexts> texts_;  // the store may drop them
  uint64_t generation_;
  TextFollower follower_;
};

absl::Span<const int32_t> PromptOf(const Sequence& sequence) {
  return absl::MakeSpan(sequence.tokens).first(sequence.request->num_prompt_tokens);
}

class HistoryDrafter final : public Drafter {
 public:
  explicit HistoryDrafter(size_t max_bytes) : store_(max_bytes) {}

  const char* name() const override { return "history"; }

  std::unique_ptr<SequenceDrafter> Begin(const Sequence& sequence) override {
    const Request& request = *sequence.request;
    const absl::Span<const int32_t> prompt = PromptOf(sequence);
    const absl::Span<const int32_t> own = request.DraftOf(sequence.sample);
    if (!own.empty()) store_.Add(request.client, prompt, own);
    return std::make_unique<HistorySequence>(store_.Open(request.client, prompt), prompt.size(),
                                             own);
  }

  void End(const Sequence& sequence) override {
    const absl::Span<const int32_t> prompt = PromptOf(sequence);
    store_.Add(sequence.request->client, prompt,
               absl::MakeSpan(sequence.tokens).subspan(prompt.size()));
  }

 private:
  HistoryStore store_;
};

}  // namespace

std::unique_ptr<Drafter> MakeHistoryDrafter(size_t max_bytes) {
  return std::make_unique<HistoryDrafter>(max_bytes);
}

}  // namespace isobit
