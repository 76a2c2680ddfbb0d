// Sets up tiny engines. See engine_fixture.h.
#include "tests/rollout/engine/engine_fixture.h"

#include <chrono>
#include <thread>
#include <utility>

#include "kernels/cpu/cpu_backend.h"
#include "tests/rollout/engine/deferred_executor.h"
#include "tests/support/bitwise.h"
#include "tests/support/status_matchers.h"
#include "tests/support/tiny_model.h"

namespace isobit {

void RecordingSink::OnToken(uint32_t sample, SampledToken token) {
  EXPECT_FALSE(done.has_value());
  SampleResult& result = samples[sample];
  EXPECT_FALSE(result.end.has_value());
  result.tokens.push_back(token.id);
  result.logprobs.push_back(token.logprob);
  result.versions.push_back(token.weight_version);
  result.top.push_back(std::move(token.top));
}

void RecordingSink::OnSampleEnd(uint32_t sample, SampleEnd end) {
  EXPECT_FALSE(done.has_value());
  EXPECT_FALSE(samples[sample].end.has_value());
  EXPECT_EQ(end.num_completion_tokens, samples[sample].tokens.size());
  samples[sample].end = std::move(end);
}

void RecordingSink::OnDone(const absl::Status& status) {
  EXPECT_FALSE(done.has_value());
  done = status;
}

EngineFixture::EngineFixture() : config_(testing_support::TinyConfig(Architecture::kQwen3)) {
  testing_support::WriteTinyModel(config_, 1, root_.File("v1"));
  testing_support::WriteTinyModel(config_, 2, root_.File("v2"));
}

EngineOptions EngineFixture::DefaultOptions() const {
  EngineOptions options;
  options.model_root = root_.path();
  options.runner = {.tensor_parallel_size = 4,
                    .mode = NumericsMode::kTree,
                    .page_size = 4,
                    .num_pages = 64,
                    .max_positions = 200,
                    .make_rank = RankOf([] { return MakeCpuBackend({}); })};
  options.scheduler = {.max_running = 16, .max_batch_tokens = 256};
  return options;
}

MakeRank EngineFixture::RankOf(MakeHostOps make_ops, MakeHostOps make_fast_ops) const {
  const MakeRank host = MakeHostRank(std::move(make_ops), 0, std::move(make_fast_ops));
  return depth_ == 1 ? host : MakeDeferredRank(host);
}

std::unique_ptr<Engine> EngineFixture::MakeEngine(const EngineOptions& options,
                                                  const std::string& model) const {
  absl::StatusOr<std::unique_ptr<Engine>> engine = Engine::Create(config_, options);
  ISOBIT_EXPECT_OK(engine);
  ISOBIT_EXPECT_OK(Update(**engine, {.model_path = model}));
  return *std::move(engine);
}

absl::StatusOr<WeightUpdateResult> EngineFixture::Update(Engine& engine,
                                                         const WeightUpdate& update) {
  std::optional<absl::StatusOr<WeightUpdateResult>> result;
  engine.UpdateWeights(update,
                       [&](absl::StatusOr<WeightUpdateResult> r) { result = std::move(r); });
  while (!result) {
    engine.Step();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return *result;
}

absl::StatusOr<ProbeResult> EngineFixture::Probe(Engine& engine, const std::vector<int32_t>& tokens,
                                                 const ProbeWanted& wanted) {
  std::optional<absl::StatusOr<ProbeResult>> result;
  engine.Probe(tokens, wanted, [&](absl::StatusOr<ProbeResult> r) { result = std::move(r); });
  while (!result) engine.Step();
  return *result;
}

std::shared_ptr<std::optional<absl::StatusOr<PauseResult>>> EngineFixture::Pause(Engine& engine,
                                                                                 PauseMode mode) {
  auto result = std::make_shared<std::optional<absl::StatusOr<PauseResult>>>();
  engine.Pause(mode, [result](absl::StatusOr<PauseResult> r) { *result = std::move(r); });
  return result;
}

GenerationRequest EngineFixture::MakeRequest(const std::string& id, uint64_t seed) {
  GenerationRequest request;
  request.id = id;
  request.prompt = {3, 14, 15, 92, 65};
  request.sampling.seed = seed;
  request.sampling.max_tokens = 8;
  request.sampling.ignore_eos = true;
  return request;
}

std::shared_ptr<RecordingSink> EngineFixture::Submit(Engine& engine,
                                                     const GenerationRequest& request) {
  auto sink = std::make_shared<RecordingSink>();
  ISOBIT_EXPECT_OK(engine.Submit(request, sink));
  return sink;
}

void EngineFixture::Steps(Engine& engine, int count) const {
  for (int i = 0; i < count + depth_ - 1; ++i) engine.Step();
}

void EngineFixture::Run(Engine& engine) {
  while (engine.Step()) {
  }
}

SampleResult EngineFixture::Generate(Engine& engine, const GenerationRequest& request) {
  const auto sink = Submit(engine, request);
  Run(engine);
  EXPECT_EQ(sink->done, absl::OkStatus());
  EXPECT_TRUE(sink->samples[0].end.has_value());
  return sink->samples[0];
}

void ExpectSameTokens(const SampleResult& actual, const SampleResult& expected) {
  EXPECT_EQ(actual.tokens, expected.tokens);
  EXPECT_TRUE(testing_support::BitwiseEqual(actual.logprobs, expected.logprobs));
}

}  // namespace isobit
