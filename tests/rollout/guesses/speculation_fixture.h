// Requests run with and without guesses, and how their results are compared.
#ifndef ISOBIT_TESTS_ROLLOUT_GUESSES_SPECULATION_FIXTURE_H_
#define ISOBIT_TESTS_ROLLOUT_GUESSES_SPECULATION_FIXTURE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/rollout/engine/engine_fixture.h"
#include "tests/rollout/guesses/scripted_drafter.h"

namespace isobit {

// The sinks of requests, in order.
using Results = std::vector<std::shared_ptr<RecordingSink>>;

// What differs between two runs, and how much was looked at.
struct Comparison {
  int64_t tokens = 0;        // compared
  int64_t different = 0;     // of them: id, logprob bits, weight version or top list
  int64_t other_ends = 0;    // samples that ended otherwise: reason, stop token, counts
  int64_t draft_tokens = 0;  // of the second run
  int64_t accepted = 0;
  bool same() const { return tokens > 0 && different == 0 && other_ends == 0; }
};

class SpeculationFixture : public EngineDepthFixture {
 protected:
  // Requests over all sampling parameters, `n` samples each.
  std::vector<GenerationRequest> AllParameters(uint32_t n, uint32_t max_tokens = 20) const;

  // `all` requests, of which so many, the first ones, may have guesses.
  std::vector<GenerationRequest> FirstWithGuesses(int with_guesses, int all,
                                                  uint32_t max_tokens) const;

  // What happens to the engine between two of its steps; the number counts up from 0.
  using Disturb = std::function<void(Engine& engine, int step)>;

  // Submits all, steps until all have ended.
  Results RunAll(const EngineOptions& options, const std::vector<GenerationRequest>& requests,
                 const Disturb& disturb = nullptr) const;

  // What the samples drew.
  static std::shared_ptr<const Script> ScriptOf(const std::vector<GenerationRequest>& requests,
                                                const Results& results);

  static void Compare(const Results& expected, const Results& actual, Comparison& sum);

  EngineOptions WithGuesses(EngineOptions options, const std::shared_ptr<const Script>& script,
                            const IsRight& is_right, size_t max_guesses = 5) const {
    options.make_guesser =
        Speculation::Maker(Scripted(script, is_right, config_.vocab_size, max_guesses));
    return options;
  }
};

}  // namespace isobit

#endif  // ISOBIT_TESTS_ROLLOUT_GUESSES_SPECULATION_FIXTURE_H_
