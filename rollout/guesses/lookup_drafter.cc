// The drafter `lookup`: finds where the sequence's last tokens occurred before in its own prompt or
// completion, and guesses what followed there. For edits, quotations, code, and loops.
#include "rollout/guesses/drafters.h"
#include "rollout/guesses/suffix_index.h"

namespace isobit {
namespace {

class LookupSequence final : public SequenceDrafter {
 public:
  void Guess(absl::Span<const int32_t> tokens, size_t most,
             std::vector<int32_t>& guesses) override {
    index_.Extend(tokens);
    follower_.Advance(tokens, index_, tokens);
    const SuffixIndex::Place& place = follower_.place();
    if (place.length == 0) return;
    // Where the text ends, the guesses go on as the text: a loop has no other continuation.
    const size_t period = tokens.size() - place.end;
    for (size_t i = 0; i < most; ++i) guesses.push_back(tokens[place.end + i % period]);
  }

 private:
  SuffixIndex index_;
  TextFollower follower_;
};

class LookupDrafter final : public Drafter {
 public:
  const char* name() const override { return "lookup"; }
  std::unique_ptr<SequenceDrafter> Begin(const Sequence& /*sequence*/) override {
    return std::make_unique<LookupSequence>();
  }
};

}  // namespace

std::unique_ptr<Drafter> MakeLookupDrafter() { return std::make_unique<LookupDrafter>(); }

}  // namespace isobit
