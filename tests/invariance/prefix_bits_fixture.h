// Runs groups, repeated prompts and conversations through the rollout engine, with shared prompts
// and without, in any configuration: shared by the tests of their bits on CPUs and GPUs.
#ifndef ISOBIT_TESTS_INVARIANCE_PREFIX_BITS_FIXTURE_H_
#define ISOBIT_TESTS_INVARIANCE_PREFIX_BITS_FIXTURE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/config/numerics_mode.h"
#include "gtest/gtest.h"
#include "rollout/engine/engine.h"

namespace isobit::invariance {

struct PrefixSetup {
  bool share = true;
  double cache_fraction = 1.0;
  int tp_size = 1;
  NumericsMode mode = NumericsMode::kTree;
  int32_t page_size = 16;
  int32_t num_pages = 1024;
  size_t max_running = 64;
  int64_t max_batch_tokens = 4096;
  int64_t max_positions = 256;
  MakeRank make_rank{};  // a backend in place of the CPU's
};

struct PrefixSample {
  std::vector<int32_t> tokens;
  std::vector<uint32_t> logprobs;  // bits
  uint32_t num_cached = 0;
  uint32_t num_preemptions = 0;
  std::optional<FinishReason> reason{};

  bool operator==(const PrefixSample& other) const {
    return tokens == other.tokens && logprobs == other.logprobs;
  }
};
using PrefixSamples = std::vector<PrefixSample>;  // of a request

// The parameter: the name of a tiny model.
class PrefixBitsFixture : public testing::TestWithParam<std::string> {
 protected:
  PrefixBitsFixture();

  // An engine that serves the model.
  std::unique_ptr<Engine> MakeEngine(const PrefixSetup& setup) const;

  // Prompts of one token, of whole pages of 4 and 16 tokens, one more and one less, some the
  // beginning of others; n samples of each, and every kind of sampling.
  std::vector<GenerationRequest> Groups(uint32_t n) const;
  // The same with prompts about one and two splits of attention long, as far as the model takes
  // them: for max_positions of 2048.
  std::vector<GenerationRequest> LongGroups(uint32_t n) const;

  // The request's next turn: its prompt, its first sample, and three more tokens.
  GenerationRequest NextTurn(const GenerationRequest& request, const PrefixSamples& samples) const;

  // Submits all at one time and runs until they have ended.
  static std::vector<PrefixSamples> Run(Engine& engine,
                                        const std::vector<GenerationRequest>& requests);

  // What each request gives when it runs alone on an engine that shares nothing, for comparison.
  // Kept, so that each configuration is compared with the same.
  const std::vector<PrefixSamples>& Alone(const std::vector<GenerationRequest>& requests);

  // Cold, warm and in conversations: every sample has the bits that it has alone. `requests` run
  // at one time.
  void ExpectTheBitsOfAlone(const PrefixSetup& setup,
                            const std::vector<GenerationRequest>& requests);

  ModelConfig config_;

 private:
  GenerationRequest Group(uint32_t length, uint32_t n) const;

  std::map<std::string, std::vector<PrefixSamples>> alone_;  // by the requests' ids
};

uint32_t MostCached(const std::vector<PrefixSamples>& all);
uint32_t Preemptions(const std::vector<PrefixSamples>& all);

}  // namespace isobit::invariance

#endif  // ISOBIT_TESTS_INVARIANCE_PREFIX_BITS_FIXTURE_H_
