// Guesses from a script, some spoiled on purpose.
#include "tests/rollout/guesses/scripted_drafter.h"

#include <random>

#include "rollout/schedule/request.h"

namespace isobit {
namespace {

class ScriptedSequence final : public SequenceDrafter {
 public:
  ScriptedSequence(const std::vector<int32_t>& script, const Sequence& sequence, IsRight is_right,
                   int32_t vocab_size)
      : script_(script), sequence_(sequence), is_right_(std::move(is_right)), vocab_(vocab_size) {}

  void Guess(absl::Span<const int32_t> tokens, size_t most,
             std::vector<int32_t>& guesses) override {
    const size_t done = tokens.size() - sequence_.request->num_prompt_tokens;
    for (size_t index = done; index < done + most; ++index) {
      const int32_t right = index < script_.size() ? script_[index] : 0;
      guesses.push_back(is_right_(sequence_.sample, index) ? right : (right + 1) % vocab_);
    }
  }

 private:
  const std::vector<int32_t>& script_;
  const Sequence& sequence_;
  const IsRight is_right_;
  const int32_t vocab_;
};

class ScriptedDrafter final : public Drafter {
 public:
  ScriptedDrafter(std::shared_ptr<const Script> script, IsRight is_right, int32_t vocab_size)
      : script_(std::move(script)), is_right_(std::move(is_right)), vocab_(vocab_size) {}

  const char* name() const override { return "scripted"; }
  std::unique_ptr<SequenceDrafter> Begin(const Sequence& sequence) override {
    const auto found = script_->find({sequence.request->id, sequence.sample});
    if (found == script_->end()) return nullptr;
    return std::make_unique<ScriptedSequence>(found->second, sequence, is_right_, vocab_);
  }

 private:
  const std::shared_ptr<const Script> script_;
  const IsRight is_right_;
  const int32_t vocab_;
};

}  // namespace

IsRight Always() {
  return [](uint32_t, size_t) { return true; };
}
IsRight Never() {
  return [](uint32_t, size_t) { return false; };
}
IsRight UpTo(size_t index) {
  return [index](uint32_t, size_t i) { return i < index; };
}
IsRight Mixed(double probability) {
  return [probability](uint32_t sample, size_t index) {
    std::mt19937 random(static_cast<uint32_t>(index * 64 + sample));
    return std::uniform_real_distribution<double>()(random) < probability;
  };
}

StepCosts FreeGuesses() {
  const std::vector<StepCost> constant = {{1, 1}, {512, 1}};
  return {.decode = constant, .rows = constant};
}

SpeculationOptions Scripted(const std::shared_ptr<const Script>& script, const IsRight& is_right,
                            int32_t vocab_size, size_t max_guesses) {
  return {.make_drafters =
              [=] {
                std::vector<std::unique_ptr<Drafter>> drafters;
                drafters.push_back(std::make_unique<ScriptedDrafter>(script, is_right, vocab_size));
                return drafters;
              },
          .max_guesses = max_guesses,
          .costs = FreeGuesses()};
}

}  // namespace isobit
