// Runs the same requests through the rollout engine and the scorer in any configuration: shared by
// the tests of the services' bits.
#ifndef ISOBIT_TESTS_INVARIANCE_SERVICE_BITS_FIXTURE_H_
#define ISOBIT_TESTS_INVARIANCE_SERVICE_BITS_FIXTURE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/config/numerics_mode.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/runtime/rank_executor.h"
#include "rollout/engine/engine.h"
#include "trainer_bridge/scorer/scorer.h"

namespace isobit::invariance {

struct Completion {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  uint32_t num_preemptions = 0;
};

// Tokens and bits of logprobs.
bool Equal(const std::vector<Completion>& a, const std::vector<Completion>& b);

struct RolloutSetup {
  int tp_size = 1;
  NumericsMode mode = NumericsMode::kTree;
  int32_t page_size = 16;
  int32_t num_pages = 512;
  CpuOptions cpu{};
  bool spoiled = false;  // a control: leaves in another order
  MakeRank make_rank{};  // a backend in place of the CPU's
};

struct ScorerSetup {
  int shards = 1;
  NumericsMode mode = NumericsMode::kTree;
  int64_t max_batch_tokens = 512;
  bool reversed = false;
  bool spoiled = false;  // a control: leaves in another order
  // Puts another backend into the options; null: the CPU's.
  std::function<void(ScorerOptions&)> choose_backend{};
};

// An engine that serves the tiny model of that name, below options.model_root.
std::unique_ptr<Engine> ServeTinyModel(const ModelConfig& config, const EngineOptions& options,
                                       const std::string& name);

// The parameter: the name of a tiny model.
class ServiceBitsFixture : public testing::TestWithParam<std::string> {
 protected:
  ServiceBitsFixture();

  // All requests at one time, or only `count` of them from `first` on.
  std::vector<Completion> Generate(const RolloutSetup& setup, size_t first = 0,
                                   size_t count = 16) const;

  // Scores what was generated, each request under its own parameters.
  std::vector<Completion> Score(const std::vector<Completion>& completions,
                                const ScorerSetup& setup) const;

  ModelConfig config_;
  std::vector<GenerationRequest> requests_;
};

// The parameters of the tests, and their names.
std::vector<std::string> ServiceBitsModels();
std::string ServiceBitsName(const testing::TestParamInfo<std::string>& info);

}  // namespace isobit::invariance

#endif  // ISOBIT_TESTS_INVARIANCE_SERVICE_BITS_FIXTURE_H_
