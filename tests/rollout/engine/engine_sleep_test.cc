// Sleep and WakeUp: memory goes back to the system and comes again, and no bit changes.
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/host_device.h"
#include "rollout/engine/engine.h"
#include "tests/rollout/engine/engine_fixture.h"
#include "tests/support/forwarding_backend.h"
#include "tests/support/status_matchers.h"
#include "tests/support/tiny_model.h"

namespace isobit {
namespace {

using testing::Each;
using testing::HasSubstr;
using testing_support::StatusIs;

constexpr SleepLevel kBothLevels[] = {SleepLevel::kKvCache, SleepLevel::kKvCacheAndWeights};

absl::StatusOr<SleepResult> Sleep(Engine& engine, SleepLevel level,
                                  PauseMode mode = PauseMode::kKeep) {
  std::optional<absl::StatusOr<SleepResult>> result;
  engine.Sleep(level, mode, [&](absl::StatusOr<SleepResult> r) { result = std::move(r); });
  while (!result) engine.Step();
  return *result;
}
absl::StatusOr<size_t> WakeUp(Engine& engine) {
  std::optional<absl::StatusOr<size_t>> result;
  engine.WakeUp([&](absl::StatusOr<size_t> r) { result = std::move(r); });
  while (!result) engine.Step();
  return *result;
}

using EngineSleepTest = EngineDepthFixture;
INSTANTIATE_TEST_SUITE_P(Depth, EngineSleepTest, testing::Values(1, 2),
                         testing::PrintToStringParamName());

TEST_P(EngineSleepTest, KeptRequestsGoOnWithTheSameBits) {
  for (const SleepLevel level : kBothLevels) {
    SCOPED_TRACE(static_cast<int>(level));
    const auto engine = MakeEngine();
    const SampleResult expected = Generate(*engine, MakeRequest("r"));
    const RankMemory before = engine->memory();
    const auto kept = Submit(*engine, MakeRequest("r"));
    Steps(*engine, 3);
    ISOBIT_ASSERT_OK_AND_ASSIGN(const SleepResult slept, Sleep(*engine, level));
    EXPECT_EQ(slept.paused.num_kept, 1u);
    EXPECT_GT(slept.released_bytes, before.kv_cache);
    EXPECT_EQ(engine->memory().kv_cache, 0u);
    EXPECT_EQ(engine->memory().weights, level == SleepLevel::kKvCache ? before.weights : 0u);
    EXPECT_TRUE(engine->load().asleep);
    EXPECT_EQ(engine->load().num_used_pages, 0);

    const auto waiting = Submit(*engine, MakeRequest("waiting"));
    EXPECT_FALSE(engine->Step());
    EXPECT_THAT(engine->Continue(),
                StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("WakeUp")));
    ISOBIT_ASSERT_OK_AND_ASSIGN(const size_t resumed, WakeUp(*engine));
    EXPECT_EQ(resumed, 2u);
    EXPECT_FALSE(engine->load().asleep);
    EXPECT_EQ(engine->memory().total(), before.total());
    Run(*engine);
    ExpectSameTokens(kept->samples[0], expected);
    ExpectSameTokens(waiting->samples[0], expected);
    EXPECT_THAT(kept->samples[0].versions, Each(1u));
    ISOBIT_EXPECT_OK(WakeUp(*engine)) << "awake already";
  }
}

TEST_P(EngineSleepTest, PrefixesAreForgotten) {
  EngineOptions options = DefaultOptions();
  options.scheduler.share_prefixes = true;
  const auto engine = MakeEngine(options);
  GenerationRequest request = MakeRequest("r");
  request.prompt = {5, 6, 7, 8, 9, 10, 11, 12, 13};
  const SampleResult expected = Generate(*engine, request);
  EXPECT_GT(Generate(*engine, request).end->num_cached_prompt_tokens, 0u);
  ISOBIT_ASSERT_OK(Sleep(*engine, SleepLevel::kKvCache));
  ISOBIT_ASSERT_OK(WakeUp(*engine));
  const SampleResult after = Generate(*engine, request);
  EXPECT_EQ(after.end->num_cached_prompt_tokens, 0u);
  ExpectSameTokens(after, expected);
}

TEST_P(EngineSleepTest, AbortAndWaitDoWhatAPauseDoes) {
  const auto engine = MakeEngine();
  const auto aborted = Submit(*engine, MakeRequest("aborted"));
  Steps(*engine, 2);
  ISOBIT_ASSERT_OK_AND_ASSIGN(const SleepResult slept,
                              Sleep(*engine, SleepLevel::kKvCache, PauseMode::kAbort));
  EXPECT_EQ(slept.paused.num_aborted, 1u);
  EXPECT_EQ(aborted->samples[0].end->reason, FinishReason::kAbort);
  ISOBIT_ASSERT_OK(WakeUp(*engine));
  const auto finished = Submit(*engine, MakeRequest("finished"));
  Steps(*engine, 2);
  ISOBIT_ASSERT_OK(Sleep(*engine, SleepLevel::kKvCache, PauseMode::kWait));
  EXPECT_EQ(finished->samples[0].end->reason, FinishReason::kLength);
}

TEST_P(EngineSleepTest, NewWeightsComeWhileAsleep) {
  const SampleResult expected = Generate(*MakeEngine(DefaultOptions(), "v2"), MakeRequest("r"));
  for (const SleepLevel level : kBothLevels) {
    const auto engine = MakeEngine();
    const size_t weights = engine->memory().weights;
    ISOBIT_ASSERT_OK(Sleep(*engine, level));
    ISOBIT_ASSERT_OK(Update(*engine, {.model_path = "v2"}));
    EXPECT_EQ(engine->memory().weights, weights);
    EXPECT_EQ(engine->memory().kv_cache, 0u) << "an update does not wake it";
    EXPECT_TRUE(engine->load().asleep);
    ISOBIT_ASSERT_OK(WakeUp(*engine));
    EXPECT_EQ(engine->weight_version()->id, 2u);
    ExpectSameTokens(Generate(*engine, MakeRequest("r")), expected);
    ISOBIT_ASSERT_OK(Sleep(*engine, level)) << "and once more, with the weights that came";
    ISOBIT_ASSERT_OK(WakeUp(*engine));
    ExpectSameTokens(Generate(*engine, MakeRequest("r")), expected);
  }
}

TEST_P(EngineSleepTest, AfterAFailedUpdateTheOldWeightsAreReadAgain) {
  const auto engine = MakeEngine();
  const SampleResult expected = Generate(*engine, MakeRequest("r"));
  const std::string digest = engine->weight_version()->digest;
  ISOBIT_ASSERT_OK(Sleep(*engine, SleepLevel::kKvCacheAndWeights));
  EXPECT_FALSE(Update(*engine, {.model_path = "missing"}).ok());
  EXPECT_FALSE(Update(*engine, {.model_path = "v2", .expected_digest = digest}).ok())
      << "after the memory was filled";
  ISOBIT_ASSERT_OK(WakeUp(*engine));
  EXPECT_EQ(engine->weight_version()->id, 1u);
  EXPECT_EQ(engine->weight_version()->digest, digest);
  ExpectSameTokens(Generate(*engine, MakeRequest("r")), expected);
}

TEST_P(EngineSleepTest, ADirectoryThatHasChangedDoesNotWakeIt) {
  const auto engine = MakeEngine();
  ISOBIT_ASSERT_OK(Sleep(*engine, SleepLevel::kKvCacheAndWeights));
  testing_support::WriteTinyModel(config_, 2, root_.File("v1"));
  EXPECT_THAT(WakeUp(*engine),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("digest")));
  EXPECT_TRUE(engine->load().asleep);
  ISOBIT_ASSERT_OK(Update(*engine, {.model_path = "v2"}));
  ISOBIT_ASSERT_OK(WakeUp(*engine));
  EXPECT_EQ(Generate(*engine, MakeRequest("r")).end->reason, FinishReason::kLength);
}

TEST_P(EngineSleepTest, ADeeperSleepGivesBackTheRest) {
  const auto engine = MakeEngine();
  const RankMemory before = engine->memory();
  ISOBIT_ASSERT_OK(Sleep(*engine, SleepLevel::kKvCache));
  ISOBIT_ASSERT_OK_AND_ASSIGN(const SleepResult deeper,
                              Sleep(*engine, SleepLevel::kKvCacheAndWeights));
  EXPECT_GE(deeper.released_bytes, before.weights);
  EXPECT_EQ(engine->memory().total(), 0u);
  ISOBIT_ASSERT_OK(WakeUp(*engine));
  EXPECT_EQ(engine->memory().total(), before.total());
}

// For TSan: GetServerInfo and the metrics read it at any time.
TEST_P(EngineSleepTest, MemoryIsReadMeanwhile) {
  const auto engine = MakeEngine();
  const size_t before = engine->memory().total();
  std::atomic<bool> stop = false;
  std::thread reader([&] {
    while (!stop) EXPECT_LE(engine->memory().total(), before);
  });
  for (const SleepLevel level : kBothLevels) {
    ISOBIT_EXPECT_OK(Sleep(*engine, level));
    ISOBIT_EXPECT_OK(WakeUp(*engine));
  }
  stop = true;
  reader.join();
}

TEST_P(EngineSleepTest, AnUpdateKeepsItsMemory) {
  const auto engine = MakeEngine();
  std::optional<absl::StatusOr<WeightUpdateResult>> updated;
  engine->UpdateWeights({.model_path = "v2"},
                        [&](absl::StatusOr<WeightUpdateResult> r) { updated = std::move(r); });
  std::optional<absl::StatusOr<SleepResult>> slept;
  engine->Sleep(SleepLevel::kKvCacheAndWeights, PauseMode::kKeep,
                [&](absl::StatusOr<SleepResult> r) { slept = std::move(r); });
  while (!updated || !slept) engine->Step();
  ISOBIT_EXPECT_OK(*updated);
  if (!slept->ok()) {
    EXPECT_THAT(*slept, StatusIs(absl::StatusCode::kAborted, HasSubstr("update")));
  }
  ISOBIT_ASSERT_OK(WakeUp(*engine));
  ExpectSameTokens(Generate(*engine, MakeRequest("r")),
                   Generate(*MakeEngine(DefaultOptions(), "v2"), MakeRequest("r")));
}

TEST_P(EngineSleepTest, RequestsAreRefusedIfTheOptionSaysSo) {
  EngineOptions options = DefaultOptions();
  options.refuse_while_asleep = true;
  const auto engine = MakeEngine(options);
  ISOBIT_ASSERT_OK(Sleep(*engine, SleepLevel::kKvCache));
  EXPECT_THAT(engine->Submit(MakeRequest("r"), std::make_shared<RecordingSink>()),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("WakeUp")));
  ISOBIT_ASSERT_OK(WakeUp(*engine));
  EXPECT_EQ(Generate(*engine, MakeRequest("r")).end->reason, FinishReason::kLength);
}

// Memory that cannot be taken again as long as `full` says so.
class CrowdedDevice final : public HostDevice {
 public:
  explicit CrowdedDevice(const bool& full) : full_(full) {}
  absl::StatusOr<std::unique_ptr<ReleasableMemory>> AllocateReleasable(size_t bytes) override {
    auto memory = HostDevice::AllocateReleasable(bytes);
    if (!memory.ok()) return memory;
    return std::make_unique<Crowded>(*std::move(memory), full_);
  }

 private:
  class Crowded final : public ReleasableMemory {
   public:
    Crowded(std::unique_ptr<ReleasableMemory> memory, const bool& full)
        : memory_(std::move(memory)), full_(full) {
      address_ = memory_->get();
      bytes_ = memory_->bytes();
      released_ = false;
    }
    absl::Status Release() override {
      released_ = true;
      return memory_->Release();
    }
    absl::Status Restore() override {
      if (full_ && released_) return absl::ResourceExhaustedError("full");
      released_ = false;
      return memory_->Restore();
    }

   private:
    const std::unique_ptr<ReleasableMemory> memory_;
    const bool& full_;
  };
  const bool& full_;
};

class CrowdedOps final : public testing_support::ForwardingBackend {
 public:
  explicit CrowdedOps(const bool& full) : ForwardingBackend(MakeCpuBackend({})), device_(full) {}
  Device& device() override { return device_; }

 private:
  CrowdedDevice device_;
};

TEST_P(EngineSleepTest, ItSleepsOnWhileItsMemoryIsTaken) {
  bool full = false;
  EngineOptions options = DefaultOptions();
  // Only one of four ranks finds no room.
  int made = 0;
  const bool never = false;
  options.runner.make_rank =
      RankOf([&] { return std::make_unique<CrowdedOps>(++made == 3 ? full : never); });
  const auto engine = MakeEngine(options);
  const SampleResult expected = Generate(*engine, MakeRequest("r"));
  for (const SleepLevel level : kBothLevels) {
    const auto kept = Submit(*engine, MakeRequest("r"));
    Steps(*engine, 3);
    full = true;
    ISOBIT_ASSERT_OK(Sleep(*engine, level));
    EXPECT_THAT(WakeUp(*engine), StatusIs(absl::StatusCode::kResourceExhausted));
    EXPECT_EQ(engine->memory().kv_cache, 0u);
    EXPECT_TRUE(engine->load().asleep);
    full = false;
    ISOBIT_ASSERT_OK(WakeUp(*engine));
    Run(*engine);
    ExpectSameTokens(kept->samples[0], expected);
  }
}

TEST_P(EngineSleepTest, ADrainEndsWhatSleeps) {
  const auto engine = MakeEngine();
  const auto kept = Submit(*engine, MakeRequest("kept"));
  Steps(*engine, 2);
  ISOBIT_ASSERT_OK(Sleep(*engine, SleepLevel::kKvCacheAndWeights));
  engine->BeginDrain();
  engine->Step();
  EXPECT_TRUE(kept->done.has_value());
  EXPECT_THAT(WakeUp(*engine), StatusIs(absl::StatusCode::kUnavailable));
}

}  // namespace
}  // namespace isobit
