// Sets up engine and scorer for tests of their bits. See service_bits_fixture.h.
#include "tests/invariance/service_bits_fixture.h"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <utility>

#include "kernels/runtime/host_executor.h"
#include "tests/invariance/order_dependent_ops.h"
#include "tests/invariance/tiny_models.h"
#include "tests/support/bitwise.h"
#include "tests/support/status_matchers.h"

namespace isobit::invariance {
namespace {

std::unique_ptr<Backend> MakeBackend(CpuOptions cpu, NumericsMode mode, bool spoiled) {
  if (spoiled) return std::make_unique<OrderDependentOps>();
  cpu.mode = mode;
  return MakeCpuBackend(cpu);
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

class ScoreCollector final : public ScoreReceiver {
 public:
  explicit ScoreCollector(size_t count) : logprobs(count) {}
  void OnScore(SequenceScore score) override {
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

}  // namespace

bool Equal(const std::vector<Completion>& a, const std::vector<Completion>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].tokens != b[i].tokens || !testing_support::BitwiseEqual(a[i].logprobs, b[i].logprobs))
      return false;
  }
  return true;
}

std::unique_ptr<Engine> ServeTinyModel(const ModelConfig& config, const EngineOptions& options,
                                       const std::string& name) {
  auto engine = Engine::Create(config, options);
  ISOBIT_EXPECT_OK(engine.status());
  bool loaded = false;
  (*engine)->UpdateWeights({.model_path = name},
                           [&loaded](const absl::StatusOr<WeightUpdateResult>& result) {
                             ISOBIT_EXPECT_OK(result.status());
                             loaded = true;
                           });
  while (!loaded) (*engine)->Step();
  return *std::move(engine);
}

ServiceBitsFixture::ServiceBitsFixture() {
  TinyModelDirectory(GetParam());
  config_ = *LoadModelConfig(TinyModelDirectory(GetParam()));
  // Prompts of awkward lengths, every kind of sampling; penalties make a token depend on all
  // tokens before it.
  for (uint32_t i = 0; i < 16; ++i) {
    GenerationRequest request;
    request.id = std::to_string(i);
    for (uint32_t j = 0; j < 1 + (i * 11) % 47; ++j) {
      request.prompt.push_back(static_cast<int32_t>((i * 131 + j * 71 + j * j) %
                                                    static_cast<uint32_t>(config_.vocab_size)));
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

std::vector<Completion> ServiceBitsFixture::Generate(const RolloutSetup& setup, size_t first,
                                                     size_t count) const {
  EngineOptions options;
  options.model_root = TinyModelRoot();
  options.runner = {
      .tensor_parallel_size = setup.tp_size,
      .mode = setup.mode,
      .page_size = setup.page_size,
      .num_pages = setup.num_pages,
      .max_positions = 256,
      .make_rank = setup.make_rank != nullptr ? setup.make_rank : MakeHostRank([setup] {
        return MakeBackend(setup.cpu, setup.mode, setup.spoiled);
      })};
  options.scheduler = {.max_running = 16, .max_batch_tokens = 2048};
  const auto engine = ServeTinyModel(config_, options, GetParam());
  std::vector<std::shared_ptr<Collector>> sinks;
  for (size_t i = first; i < first + count; ++i) {
    sinks.push_back(std::make_shared<Collector>());
    ISOBIT_EXPECT_OK(engine->Submit(requests_[i], sinks.back()).status());
  }
  while (engine->Step()) {
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

std::vector<Completion> ServiceBitsFixture::Score(const std::vector<Completion>& completions,
                                                  const ScorerSetup& setup) const {
  ScorerOptions options;
  options.model_root = TinyModelRoot();
  options.num_shards = setup.shards;
  options.numerics = setup.mode;
  options.max_batch_tokens = setup.max_batch_tokens;
  options.backend.make_ops = [setup](int) { return MakeBackend({}, setup.mode, setup.spoiled); };
  if (setup.choose_backend != nullptr) setup.choose_backend(options);
  auto scorer = Scorer::Load(options, GetParam());
  ISOBIT_EXPECT_OK(scorer.status());
  std::vector<size_t> order(completions.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = setup.reversed ? order.size() - 1 - i : i;
  std::map<size_t, std::shared_ptr<ScoreCollector>> receivers;
  for (const size_t i : order) {
    ScoreInput input;
    input.prompt = requests_[i].prompt;
    input.completion = completions[i].tokens;
    receivers[i] = std::make_shared<ScoreCollector>(1);
    ScoreOptions score_options;
    score_options.sampling = requests_[i].sampling;
    ISOBIT_EXPECT_OK((*scorer)->Submit(
        std::make_shared<ScoreJob>(std::vector{std::move(input)}, score_options, receivers[i])));
  }
  std::vector<Completion> scored = completions;
  for (const size_t i : order) {
    receivers[i]->Wait();
    ISOBIT_EXPECT_OK(receivers[i]->outcome);
    scored[i].logprobs = receivers[i]->logprobs[0];
  }
  return scored;
}

std::vector<std::string> ServiceBitsModels() {
#ifdef ISOBIT_SANITIZED
  return {"tiny-mistral"};  // one model is enough: the services' code is the same for all
#else
  return TinyModelNames();
#endif
}

std::string ServiceBitsName(const testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

}  // namespace isobit::invariance
