// The services' half of the invariance matrix: the same requests through the rollout engine and the
// scorer, in every configuration, must give the same tokens and the same logprob bits. Dimensions:
// tensor-parallel size, company, page size, preemption, threads, instruction set; shards, packing,
// order. Each has a control.
#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/model/host_executor.h"
#include "rollout/engine.h"
#include "tests/invariance/order_dependent_ops.h"
#include "tests/invariance/tiny_models.h"
#include "tests/support/bitwise.h"
#include "tests/support/status_matchers.h"
#include "trainer_bridge/scorer/scorer.h"

namespace isobit::invariance {
namespace {

using testing_support::BitwiseEqual;

struct Completion {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  uint32_t num_preemptions = 0;
};

bool Equal(const std::vector<Completion>& a, const std::vector<Completion>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].tokens != b[i].tokens || !BitwiseEqual(a[i].logprobs, b[i].logprobs)) return false;
  }
  return true;
}

std::unique_ptr<Ops> Backend(const CpuOptions& cpu, bool spoiled) {
  if (spoiled) return std::make_unique<OrderDependentOps>();
  return MakeCpuOps(cpu);
}

class Collector final : public RequestSink {
 public:
  void OnToken(uint32_t /*sample*/, SampledToken token) override {
    completion.tokens.push_back(token.id);
    completion.logprobs.push_back(token.logprob);
  }
  void OnSampleEnd(uint32_t /*sample*/, SampleEnd end) override {
    completion.num_preemptions = end.num_preemptions;
  }
  void OnDone(const absl::Status& status) override {
    done = true;
    outcome = status;
  }

  Completion completion;
  bool done = false;
  absl::Status outcome;
};

struct RolloutSetup {
  int tp_size = 1;
  NumericsMode mode = NumericsMode::kTree;
  int32_t page_size = 16;
  int32_t num_pages = 512;
  CpuOptions cpu{};
  bool spoiled = false;  // a control: leaves in another order
};

struct ScorerSetup {
  int shards = 1;
  NumericsMode mode = NumericsMode::kTree;
  int64_t max_batch_tokens = 512;
  bool reversed = false;
  bool spoiled = false;  // a control: leaves in another order
};

class ScoreCollector final : public scorer::ScoreReceiver {
 public:
  explicit ScoreCollector(size_t count) : logprobs(count) {}
  void OnScore(scorer::SequenceScore score) override {
    logprobs[score.index] = std::move(score.completion.logprobs);
  }
  void OnDone(const absl::Status& status) override {
    const std::lock_guard lock(mutex_);
    outcome = status;
    done_ = true;
    changed_.notify_all();
  }
  bool CanTakeMore() const override { return true; }
  void Wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
  }

  std::vector<std::vector<float>> logprobs;
  absl::Status outcome;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
};

class ServiceBitsTest : public testing::TestWithParam<std::string> {
 protected:
  ServiceBitsTest() {
    TinyModelDirectory(GetParam());
    config_ = *LoadModelConfig(TinyModelDirectory(GetParam()));
    // Prompts of awkward lengths, every kind of sampling; penalties make a token depend on all
    // tokens before it.
    for (uint32_t i = 0; i < 16; ++i) {
      GenerationRequest request;
      request.id = std::to_string(i);
      for (uint32_t j = 0; j < 1 + (i * 11) % 47; ++j) {
        request.prompt.push_back((i * 131 + j * 71 + j * j) %
                                 static_cast<uint32_t>(config_.vocab_size));
      }
      request.sampling.seed = 1000 + i;
      request.sampling.max_tokens = 24;
      request.sampling.ignore_eos = true;
      request.sampling.temperature = i % 4 == 3 ? 0.0f : 0.5f + 0.1f * static_cast<float>(i % 7);
      if (i % 4 == 1) request.sampling.top_p = 0.9f;
      if (i % 4 == 2) request.sampling.top_k = 30;
      if (i % 5 == 2) request.sampling.repetition_penalty = 1.2f;
      if (i % 5 == 3) request.sampling.frequency_penalty = 0.5f;
      requests_.push_back(std::move(request));
    }
  }

  // All requests at one time; only the first `count` of them.
  std::vector<Completion> Generate(const RolloutSetup& setup, size_t first = 0,
                                   size_t count = 16) const {
    EngineOptions options;
    options.model_root = TinyModelRoot();
    options.runner = {.tensor_parallel_size = setup.tp_size,
                      .mode = setup.mode,
                      .page_size = setup.page_size,
                      .num_pages = setup.num_pages,
                      .max_positions = 256,
                      .make_rank = MakeHostRank([cpu = setup.cpu, spoiled = setup.spoiled] {
                        return Backend(cpu, spoiled);
                      })};
    options.scheduler = {.max_running = 16, .max_batch_tokens = 2048};
    auto engine = Engine::Create(config_, options);
    ISOBIT_EXPECT_OK(engine.status());
    bool loaded = false;
    (*engine)->UpdateWeights({.model_path = GetParam()},
                             [&loaded](const absl::StatusOr<WeightUpdateResult>& result) {
                               ISOBIT_EXPECT_OK(result.status());
                               loaded = true;
                             });
    while (!loaded) (*engine)->Step();
    std::vector<std::shared_ptr<Collector>> sinks;
    for (size_t i = first; i < first + count; ++i) {
      sinks.push_back(std::make_shared<Collector>());
      ISOBIT_EXPECT_OK((*engine)->Submit(requests_[i], sinks.back()).status());
    }
    while ((*engine)->Step()) {
    }
    std::vector<Completion> completions;
    for (const auto& sink : sinks) {
      EXPECT_TRUE(sink->done);
      ISOBIT_EXPECT_OK(sink->outcome);
      EXPECT_EQ(sink->completion.tokens.size(), 24u);
      completions.push_back(sink->completion);
    }
    return completions;
  }

  // Scores what was generated, each request under its own parameters.
  std::vector<Completion> Score(const std::vector<Completion>& completions,
                                const ScorerSetup& setup) const {
    scorer::ScorerOptions options;
    options.model_root = TinyModelRoot();
    options.num_shards = setup.shards;
    options.numerics = setup.mode;
    options.max_batch_tokens = setup.max_batch_tokens;
    options.make_ops = [spoiled = setup.spoiled](int) { return Backend({}, spoiled); };
    auto scorer = scorer::Scorer::Load(options, GetParam());
    ISOBIT_EXPECT_OK(scorer.status());
    std::vector<size_t> order(completions.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = setup.reversed ? order.size() - 1 - i : i;
    std::map<size_t, std::shared_ptr<ScoreCollector>> receivers;
    for (const size_t i : order) {
      scorer::ScoreInput input;
      input.prompt.assign(requests_[i].prompt.begin(), requests_[i].prompt.end());
      input.completion = completions[i].tokens;
      receivers[i] = std::make_shared<ScoreCollector>(1);
      scorer::ScoreOptions score_options;
      score_options.sampling = requests_[i].sampling;
      ISOBIT_EXPECT_OK((*scorer)->Submit(std::make_shared<scorer::ScoreJob>(
          std::vector{std::move(input)}, score_options, receivers[i])));
    }
    std::vector<Completion> scored = completions;
    for (const size_t i : order) {
      receivers[i]->Wait();
      ISOBIT_EXPECT_OK(receivers[i]->outcome);
      scored[i].logprobs = receivers[i]->logprobs[0];
    }
    return scored;
  }

  ModelConfig config_;
  std::vector<GenerationRequest> requests_;
};

// INVARIANT: tensor-parallel size.
TEST_P(ServiceBitsTest, TensorParallelSize) {
  const std::vector<Completion> expected = Generate({});
  for (const int tp_size : {2, 4, 8}) {
    EXPECT_TRUE(Equal(Generate({.tp_size = tp_size}), expected)) << "TP " << tp_size;
  }
  EXPECT_FALSE(Equal(Generate({.tp_size = 4, .mode = NumericsMode::kBatchInvariant}), expected))
      << "control";
}

// INVARIANT: company: 1, 3 or 16 requests at a time.
TEST_P(ServiceBitsTest, Company) {
  const std::vector<Completion> expected = Generate({.tp_size = 4});
  const auto in_groups_of = [this](const RolloutSetup& setup, size_t size) {
    std::vector<Completion> completions;
    for (size_t first = 0; first < requests_.size(); first += size) {
      const size_t count = std::min(size, requests_.size() - first);
      for (Completion& completion : Generate(setup, first, count))
        completions.push_back(std::move(completion));
    }
    return completions;
  };
  EXPECT_TRUE(Equal(in_groups_of({.tp_size = 4}, 1), expected));
  EXPECT_TRUE(Equal(in_groups_of({.tp_size = 4}, 3), expected));
  const RolloutSetup vanilla = {.tp_size = 4, .mode = NumericsMode::kVanilla};
  EXPECT_FALSE(Equal(in_groups_of(vanilla, 1), Generate(vanilla))) << "control";
}

// INVARIANT: page size and preemption: recomputing a sequence changes no bit.
TEST_P(ServiceBitsTest, PagesAndPreemption) {
  const std::vector<Completion> expected = Generate({});
  for (const int32_t page_size : {1, 7, 64}) {
    EXPECT_TRUE(Equal(Generate({.page_size = page_size, .num_pages = 2048}), expected))
        << "page size " << page_size;
  }
  const RolloutSetup scarce = {.tp_size = 2, .page_size = 4, .num_pages = 90};
  const std::vector<Completion> preempted = Generate(scarce);
  uint32_t num_preemptions = 0;
  for (const Completion& completion : preempted) num_preemptions += completion.num_preemptions;
  EXPECT_GT(num_preemptions, 0u);
  EXPECT_TRUE(Equal(preempted, expected));

  RolloutSetup vanilla = scarce;
  vanilla.mode = NumericsMode::kVanilla;
  const std::vector<Completion> spoiled = Generate(vanilla);
  vanilla.num_pages = 2048;
  EXPECT_FALSE(Equal(spoiled, Generate(vanilla))) << "control";
}

// INVARIANT: threads and instruction sets.
TEST_P(ServiceBitsTest, ThreadsAndInstructionSets) {
  const std::vector<Completion> expected = Generate({});
  for (const cpu::Isa isa : {cpu::Isa::kPortable, cpu::Isa::kAvx2, cpu::Isa::kAvx512}) {
    if (isa > cpu::DetectIsa()) continue;
    for (const int threads : {1, 2}) {
      EXPECT_TRUE(Equal(Generate({.cpu = {.isa = isa, .num_threads = threads}}), expected))
          << cpu::IsaName(isa) << ", " << threads << " threads";
    }
  }
  EXPECT_FALSE(Equal(Generate({.spoiled = true}), expected)) << "control";
}

// INVARIANT: the scorer's bits are the rollout's, over shards, packing and order.
TEST_P(ServiceBitsTest, ScoringEqualsSampling) {
  const std::vector<Completion> sampled = Generate({.tp_size = 4});
  for (const int shards : {1, 2, 3, 4, 8}) {
    EXPECT_TRUE(Equal(Score(sampled, {.shards = shards}), sampled)) << shards << " shards";
  }
  EXPECT_FALSE(Equal(Score(sampled, {.shards = 3, .spoiled = true}), sampled)) << "control";
  for (const int64_t max_batch_tokens : {1, 60, 4096}) {
    for (const bool reversed : {false, true}) {
      const ScorerSetup setup = {
          .shards = 2, .max_batch_tokens = max_batch_tokens, .reversed = reversed};
      EXPECT_TRUE(Equal(Score(sampled, setup), sampled))
          << max_batch_tokens << (reversed ? " reversed" : "");
    }
  }
  // Controls: an ordinary engine's packing moves bits, and its sampler and scorer differ.
  const std::vector<Completion> vanilla = Generate({.tp_size = 4, .mode = NumericsMode::kVanilla});
  const std::vector<Completion> alone =
      Score(vanilla, {.mode = NumericsMode::kVanilla, .max_batch_tokens = 1});
  EXPECT_FALSE(Equal(alone, vanilla));
  EXPECT_FALSE(
      Equal(alone, Score(vanilla, {.mode = NumericsMode::kVanilla, .max_batch_tokens = 4096})));
}

std::vector<std::string> Models() {
#ifdef ISOBIT_SANITIZED
  return {"tiny-mistral"};  // the others differ in their weights, not in the services' code
#else
  return TinyModelNames();
#endif
}

INSTANTIATE_TEST_SUITE_P(Architectures, ServiceBitsTest, testing::ValuesIn(Models()),
                         [](const testing::TestParamInfo<std::string>& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace isobit::invariance
