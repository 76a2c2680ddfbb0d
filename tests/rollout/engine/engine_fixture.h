// An engine over a tiny model, whose steps the test makes itself, and a sink that keeps everything.
#ifndef ISOBIT_TESTS_ROLLOUT_ENGINE_ENGINE_FIXTURE_H_
#define ISOBIT_TESTS_ROLLOUT_ENGINE_ENGINE_FIXTURE_H_

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/checkpoint/model_config.h"
#include "gtest/gtest.h"
#include "kernels/runtime/host_executor.h"
#include "rollout/engine/engine.h"
#include "tests/support/temp_dir.h"

namespace isobit {

struct SampleResult {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  std::vector<uint64_t> versions;
  std::vector<std::vector<TokenLogProb>> top;
  std::optional<SampleEnd> end;
};

class RecordingSink final : public RequestSink {
 public:
  void OnToken(uint32_t sample, SampledToken token) override;
  void OnSampleEnd(uint32_t sample, SampleEnd end) override;
  void OnDone(const absl::Status& status) override;

  std::map<uint32_t, SampleResult> samples;
  std::optional<absl::Status> done;
};

class EngineFixture : public testing::Test {
 protected:
  EngineFixture();

  // Four ranks, 64 pages of 4 tokens.
  EngineOptions DefaultOptions() const;

  // A backend for options.runner.make_rank: a host rank, deferred where depth_ is 2. make_fast_ops:
  // of its fast path; null: it has none.
  MakeRank RankOf(MakeHostOps make_ops, MakeHostOps make_fast_ops = nullptr) const;

  // An engine that serves `model`, a directory that a test has written below root_.
  std::unique_ptr<Engine> MakeEngine(const EngineOptions& options,
                                     const std::string& model = "v1") const;
  std::unique_ptr<Engine> MakeEngine() const { return MakeEngine(DefaultOptions()); }

  // Steps until the update has replied.
  static absl::StatusOr<WeightUpdateResult> Update(Engine& engine, const WeightUpdate& update);

  // Steps until the probe has replied.
  static absl::StatusOr<ProbeResult> Probe(Engine& engine, const std::vector<int32_t>& tokens,
                                           const ProbeWanted& wanted = {});

  // Five prompt tokens, eight to generate, never stops early.
  static GenerationRequest MakeRequest(const std::string& id, uint64_t seed = 11);

  // The reply, once there is one.
  static std::shared_ptr<std::optional<absl::StatusOr<PauseResult>>> Pause(Engine& engine,
                                                                           PauseMode mode);

  // Submits and returns the sink; a refusal fails the test.
  static std::shared_ptr<RecordingSink> Submit(Engine& engine, const GenerationRequest& request);

  // Steps until a request that has just been submitted, and is admitted at once, has `count`
  // tokens.
  void Steps(Engine& engine, int count) const;

  // Steps until nothing is left to do.
  static void Run(Engine& engine);

  // Submits, runs, and returns the one sample of a request that must end well.
  static SampleResult Generate(Engine& engine, const GenerationRequest& request);

  // Tokens of a sequence that steps in flight draw while it runs.
  size_t in_flight() const { return static_cast<size_t>(depth_) - 1; }

  int depth_ = 1;  // of the ranks
  testing_support::TempDir root_;
  ModelConfig config_;  // of root_/v1 and root_/v2, whose weights differ
};

// The same, with the depth of the ranks as the parameter.
class EngineDepthFixture : public EngineFixture, public testing::WithParamInterface<int> {
 protected:
  EngineDepthFixture() { depth_ = GetParam(); }
};

void ExpectSameTokens(const SampleResult& actual, const SampleResult& expected);

}  // namespace isobit

#endif  // ISOBIT_TESTS_ROLLOUT_ENGINE_ENGINE_FIXTURE_H_
