// Weight updates: when they switch, what happens to requests in flight, and what is refused.
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/checkpoint/checkpoint.h"
#include "common/checkpoint/safetensors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/host_device.h"
#include "rollout/engine/engine.h"
#include "tests/rollout/engine/engine_fixture.h"
#include "tests/support/bitwise.h"
#include "tests/support/forwarding_backend.h"
#include "tests/support/observed_packer.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_model.h"
#include "tools/random_model.h"

namespace isobit {
namespace {

using testing::Each;
using testing::HasSubstr;
using testing_support::BitwiseEqual;
using testing_support::RandomWeights;
using testing_support::StatusIs;
using testing_support::TinyWeights;
using testing_support::WriteModel;

using EngineUpdateTest = EngineDepthFixture;
INSTANTIATE_TEST_SUITE_P(Depth, EngineUpdateTest, testing::Values(1, 2),
                         testing::PrintToStringParamName());

TEST_P(EngineUpdateTest, UpdateAbortSwitchesAtOnce) {
  const auto engine = MakeEngine();
  EXPECT_EQ(engine->weight_version()->id, 1u);
  const auto sink = Submit(*engine, MakeRequest("r"));
  engine->Step();
  ISOBIT_ASSERT_OK_AND_ASSIGN(const WeightUpdateResult result,
                              Update(*engine, {.model_path = "v2"}));
  EXPECT_EQ(result.previous.id, 1u);
  EXPECT_EQ(result.current.id, 2u);
  EXPECT_NE(result.previous.digest, result.current.digest);
  EXPECT_EQ(result.num_aborted + sink->samples[0].tokens.size() / 8, 1u)
      << "aborted, unless it finished while the weights were prepared";
  for (const uint64_t version : sink->samples[0].versions) EXPECT_EQ(version, 1u);
  EXPECT_EQ(sink->samples[0].end->weight_version.id, 1u);

  const SampleResult after = Generate(*engine, MakeRequest("after"));
  EXPECT_THAT(after.versions, Each(2u));
  EXPECT_EQ(after.end->weight_version.digest, result.current.digest);
  ExpectSameTokens(after, Generate(*MakeEngine(DefaultOptions(), "v2"), MakeRequest("r")));
}

TEST_P(EngineUpdateTest, ServesTheOldWeightsWhilePreparing) {
  const auto engine = MakeEngine();
  GenerationRequest request = MakeRequest("r");
  request.sampling.max_tokens = 190;
  const SampleResult v1 = Generate(*engine, request);
  const auto sink = Submit(*engine, request);
  Steps(*engine, 2);
  ISOBIT_ASSERT_OK(Update(*engine, {.model_path = "v2"}));
  // Whatever was generated meanwhile has the old weights' bits.
  const SampleResult& sample = sink->samples[0];
  ASSERT_GE(sample.tokens.size(), 2u);
  for (size_t i = 0; i < sample.tokens.size(); ++i) {
    EXPECT_EQ(sample.tokens[i], v1.tokens[i]);
    EXPECT_TRUE(BitwiseEqual(sample.logprobs[i], v1.logprobs[i]));
  }
}

TEST_P(EngineUpdateTest, UpdateWaitLetsWhatWasAcceptedFinishUnderTheOldWeights) {
  const auto engine = MakeEngine();
  GenerationRequest request = MakeRequest("old");
  request.sampling.max_tokens = 190;
  const auto old = Submit(*engine, request);
  engine->Step();
  std::optional<absl::StatusOr<WeightUpdateResult>> result;
  engine->UpdateWeights({.model_path = "v2", .mode = InFlightMode::kWait},
                        [&](absl::StatusOr<WeightUpdateResult> r) { result = std::move(r); });
  bool submitted = false;
  std::shared_ptr<RecordingSink> late;
  while (!result) {
    engine->Step();
    if (!submitted && old->samples[0].tokens.size() > 100) {
      late = Submit(*engine, MakeRequest("late"));
      submitted = true;
    }
  }
  ISOBIT_ASSERT_OK(*result);
  EXPECT_EQ((*result)->num_aborted, 0u);
  EXPECT_EQ(old->samples[0].end->reason, FinishReason::kLength);
  EXPECT_THAT(old->samples[0].versions, Each(1u));
  Run(*engine);
  ASSERT_TRUE(late->samples[0].end.has_value());
  EXPECT_THAT(late->samples[0].versions, Each(late->samples[0].versions.front()));
  EXPECT_THAT(EngineFixture::Generate(*engine, MakeRequest("after")).versions, Each(2u));
}

TEST_P(EngineUpdateTest, UpdateWaitFailsWhilePausedWithRequestsKept) {
  const auto engine = MakeEngine();
  const auto sink = Submit(*engine, MakeRequest("r"));
  engine->Step();
  Pause(*engine, PauseMode::kKeep);
  EXPECT_THAT(Update(*engine, {.model_path = "v2", .mode = InFlightMode::kWait}),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("in_flight_mode")));
  EXPECT_EQ(engine->weight_version()->id, 1u);
  engine->Abort({"r"});
  engine->Step();
  Submit(*engine, MakeRequest("queued"));
  ISOBIT_EXPECT_OK(Update(*engine, {.model_path = "v2", .mode = InFlightMode::kWait}))
      << "a queued request has no keys of the old weights";
  EXPECT_TRUE(engine->load().paused) << "an update does not end a pause";
}

// Every later token has the bits that the new weights give to the whole text so far.
TEST_P(EngineUpdateTest, UpdateRecomputeKvContinuesUnderTheNewWeights) {
  const auto engine = MakeEngine();
  GenerationRequest request = MakeRequest("r");
  request.sampling.max_tokens = 12;
  const auto sink = Submit(*engine, request);
  const auto other = Submit(*engine, MakeRequest("other", 3));
  Steps(*engine, 4 - static_cast<int>(in_flight()));
  Pause(*engine, PauseMode::kKeep);  // so that none finishes while the weights are prepared
  ISOBIT_ASSERT_OK_AND_ASSIGN(
      const WeightUpdateResult result,
      Update(*engine, {.model_path = "v2", .mode = InFlightMode::kRecomputeKv}));
  EXPECT_EQ(result.num_recomputed, 2u);
  EXPECT_EQ(engine->load().num_used_pages, 0) << "no key of the old weights is left";
  ISOBIT_EXPECT_OK(engine->Continue());
  Run(*engine);
  const SampleResult& sample = sink->samples[0];
  EXPECT_EQ(sample.end->reason, FinishReason::kLength);
  EXPECT_EQ(sample.end->num_preemptions, 0u);
  EXPECT_EQ(sample.end->weight_version.id, 2u);
  EXPECT_EQ(std::vector<uint64_t>(sample.versions.begin(), sample.versions.begin() + 4),
            std::vector<uint64_t>(4, 1));
  EXPECT_EQ(std::vector<uint64_t>(sample.versions.begin() + 4, sample.versions.end()),
            std::vector<uint64_t>(8, 2));
  EXPECT_EQ(other->samples[0].end->reason, FinishReason::kLength);

  GenerationRequest rest = request;
  rest.prompt.insert(rest.prompt.end(), sample.tokens.begin(), sample.tokens.begin() + 4);
  rest.sampling.max_tokens = 8;
  const SampleResult expected = Generate(*MakeEngine(DefaultOptions(), "v2"), rest);
  EXPECT_EQ(std::vector<int32_t>(sample.tokens.begin() + 4, sample.tokens.end()), expected.tokens);
  EXPECT_TRUE(BitwiseEqual(std::vector<float>(sample.logprobs.begin() + 4, sample.logprobs.end()),
                           expected.logprobs));
}

TEST_P(EngineUpdateTest, ChecksVersionAndDigest) {
  const auto engine = MakeEngine();
  EXPECT_THAT(Update(*engine, {.model_path = "v2", .weight_version = 1}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       testing::AllOf(HasSubstr("weight_version"), HasSubstr("more than 1"))));
  const std::string old_digest = engine->weight_version()->digest;
  EXPECT_THAT(Update(*engine, {.model_path = "v2", .expected_digest = old_digest}),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(old_digest)));
  EXPECT_EQ(engine->weight_version()->id, 1u);
  ISOBIT_ASSERT_OK(Update(*engine, {.model_path = "v2", .weight_version = 40}));
  EXPECT_EQ(engine->weight_version()->id, 40u);
  const std::string new_digest = engine->weight_version()->digest;
  ISOBIT_ASSERT_OK(Update(*engine, {.model_path = "v1", .expected_digest = old_digest}));
  EXPECT_EQ(engine->weight_version()->id, 41u);
  EXPECT_NE(new_digest, old_digest);
}

TEST_P(EngineUpdateTest, DummyWeightsAreUpdatedFromSeedToSeed) {
  ISOBIT_ASSERT_OK(MakeDummyModel(config_, 5, root_.File("dummy5")));
  ISOBIT_ASSERT_OK(MakeDummyModel(config_, 6, root_.File("dummy6")));
  ISOBIT_ASSERT_OK(MakeRandomModel(config_, 6, root_.File("stored6")));
  EngineOptions options = DefaultOptions();
  const auto stored = MakeEngine(options, "stored6");
  const SampleResult expected = Generate(*stored, MakeRequest("r"));
  options.load_format = LoadFormat::kDummy;
  const auto dummy = MakeEngine(options, "dummy5");
  EXPECT_NE(Generate(*dummy, MakeRequest("r")).tokens, expected.tokens);
  ISOBIT_ASSERT_OK(Update(*dummy, {.model_path = "dummy6"}));
  ExpectSameTokens(Generate(*dummy, MakeRequest("r")), expected);

  EXPECT_THAT(Update(*dummy, {.model_path = "stored6"}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("load_format dummy")));
  EXPECT_THAT(Update(*stored, {.model_path = "dummy6"}),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("model.safetensors")));
  ExpectSameTokens(Generate(*dummy, MakeRequest("r")), expected);
}

TEST_P(EngineUpdateTest, WiderWeightsAreRoundedAsAtLoad) {
  // v2's weights in fp32, each a little above or below the bf16 number that it rounds to.
  const TinyWeights narrow = RandomWeights(config_, 2);
  ISOBIT_ASSERT_OK_AND_ASSIGN(const Checkpoint v2, Checkpoint::Open(root_.File("v2")));
  std::vector<Tensor> tensors = v2.tensors();
  std::vector<std::vector<uint32_t>> wide;
  for (Tensor& tensor : tensors) {
    std::vector<uint32_t>& elements = wide.emplace_back();
    for (const uint16_t bits : narrow.tensors.at(tensor.name)) {
      const bool is_below = elements.size() % 2 == 1 && (bits & 0x7fff) != 0;
      const uint32_t exact = uint32_t{bits} << 16;
      elements.push_back(is_below ? exact - 0x7fff : exact + 0x7fff);
    }
    tensor.dtype = DType::kF32;
    tensor.data = reinterpret_cast<const uint8_t*>(elements.data());
    tensor.size_bytes = elements.size() * sizeof(float);
  }
  testing_support::WriteTinyModel(config_, 2, root_.File("wide"));
  ISOBIT_ASSERT_OK(WriteSafetensors(root_.File("wide/model.safetensors"), tensors));

  const SampleResult v1 = Generate(*MakeEngine(), MakeRequest("r"));
  const SampleResult rounded = Generate(*MakeEngine(DefaultOptions(), "v2"), MakeRequest("r"));
  EXPECT_NE(v1.tokens, rounded.tokens);
  const auto engine = MakeEngine();
  ISOBIT_ASSERT_OK(Update(*engine, {.model_path = "wide"}));
  ExpectSameTokens(Generate(*engine, MakeRequest("r")), rounded);
  ISOBIT_ASSERT_OK(Update(*engine, {.model_path = "v1"}));
  ExpectSameTokens(Generate(*engine, MakeRequest("r")), v1);
}

// A device without room for a second version.
class FullDevice final : public HostDevice {
 public:
  absl::StatusOr<Memory> AllocateBeside(size_t /*bytes*/) override {
    return absl::ResourceExhaustedError("full");
  }
};

class FullOps final : public testing_support::ForwardingBackend {
 public:
  FullOps() : ForwardingBackend(MakeCpuBackend({})) {}
  Device& device() override { return device_; }

 private:
  FullDevice device_;
};

TEST_P(EngineUpdateTest, UpdatesThatTheDeviceHasNoRoomForComeFromHostMemory) {
  const SampleResult expected = Generate(*MakeEngine(DefaultOptions(), "v2"), MakeRequest("r"));
  EngineOptions options = DefaultOptions();
  options.runner.make_rank = RankOf([] { return std::make_unique<FullOps>(); });
  const auto engine = MakeEngine(options);
  ISOBIT_ASSERT_OK(Update(*engine, {.model_path = "v2"}));
  ExpectSameTokens(Generate(*engine, MakeRequest("r")), expected);
}

TEST_P(EngineUpdateTest, OneUpdateAtATime) {
  const auto engine = MakeEngine();
  std::optional<absl::StatusOr<WeightUpdateResult>> first;
  engine->UpdateWeights({.model_path = "v2"},
                        [&](absl::StatusOr<WeightUpdateResult> r) { first = std::move(r); });
  EXPECT_THAT(Update(*engine, {.model_path = "v2"}), StatusIs(absl::StatusCode::kAborted));
  while (!first) engine->Step();
  ISOBIT_EXPECT_OK(*first);
}

TEST_P(EngineUpdateTest, AnAbandonedUpdateIsDroppedBeforeItsSwitch) {
  for (const InFlightMode mode :
       {InFlightMode::kAbort, InFlightMode::kWait, InFlightMode::kRecomputeKv}) {
    SCOPED_TRACE(static_cast<int>(mode));
    const auto engine = MakeEngine();
    const SampleResult expected = Generate(*engine, MakeRequest("r"));
    const auto running = Submit(*engine, MakeRequest("r"));
    Steps(*engine, 2);
    bool gone = false;
    std::optional<absl::StatusOr<WeightUpdateResult>> result;
    engine->UpdateWeights({.model_path = "v2", .mode = mode, .is_abandoned = [&] { return gone; }},
                          [&](absl::StatusOr<WeightUpdateResult> r) { result = std::move(r); });
    while (engine->is_preparing()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (mode == InFlightMode::kWait) engine->Step();  // the others would switch
    const auto late = Submit(*engine, MakeRequest("late"));
    gone = true;
    engine->Wake();
    Run(*engine);
    EXPECT_THAT(result.value(), StatusIs(absl::StatusCode::kCancelled, HasSubstr("update")));
    EXPECT_EQ(engine->weight_version()->id, 1u);
    ExpectSameTokens(running->samples[0], expected);
    ASSERT_TRUE(late->done.has_value()) << "held";
    EXPECT_THAT(late->samples[0].versions, Each(1u));
    ISOBIT_EXPECT_OK(Update(*engine, {.model_path = "v2"})) << "nothing is left of the first";
    EXPECT_EQ(engine->weight_version()->id, 2u);
  }
}

// Counts the matrices that are packed.
class CountingOps final : public testing_support::ForwardingBackend {
 public:
  explicit CountingOps(std::atomic<int>& packed)
      : ForwardingBackend(MakeCpuBackend({})),
        packer_(CpuWeightPacker(), [&packed] { ++packed; }) {}
  const WeightPacker& packer() const override { return packer_; }

 private:
  const testing_support::ObservedPacker packer_;
};

TEST_P(EngineUpdateTest, AnAbandonedUpdateStopsWhileItIsPrepared) {
  std::atomic<int> packed = 0;
  EngineOptions options = DefaultOptions();
  options.runner.make_rank = RankOf([&] { return std::make_unique<CountingOps>(packed); });
  const auto engine = MakeEngine(options);
  const SampleResult expected = Generate(*engine, MakeRequest("r"));
  packed = 0;
  EXPECT_THAT(Update(*engine, {.model_path = "v2", .is_abandoned = [] { return true; }}),
              StatusIs(absl::StatusCode::kCancelled, HasSubstr("the caller")));
  EXPECT_EQ(packed, 0);
  EXPECT_EQ(engine->weight_version()->id, 1u);
  ExpectSameTokens(Generate(*engine, MakeRequest("r")), expected);
  ISOBIT_EXPECT_OK(Update(*engine, {.model_path = "v2"})) << "nothing is left of the first";
  EXPECT_GT(packed, 0);
}

// Every damaged directory is refused with its name, and the old weights go on with the old bits.
TEST_P(EngineUpdateTest, FailedUpdatesLeaveTheOldWeightsServing) {
  const auto write = [this](const std::string& name, auto damage) {
    TinyWeights weights = RandomWeights(config_, 2);
    damage(weights);
    WriteModel(config_, weights, root_.File(name));
  };
  const auto edit = [this](const std::string& name, auto damage) {
    WriteModel(config_, RandomWeights(config_, 2), root_.File(name));
    const std::string path = root_.File(name + "/model.safetensors");
    std::ifstream in(path, std::ios::binary);
    std::string bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    damage(bytes);
    root_.Write(name + "/model.safetensors", bytes);
  };
  write("missing", [](TinyWeights& w) { w.tensors.erase("model.norm.weight"); });
  edit("truncated", [](std::string& bytes) { bytes.resize(bytes.size() - 100); });
  edit("oversized", [](std::string& bytes) { bytes += "extra"; });
  edit("mistyped", [](std::string& bytes) {
    const size_t at = bytes.find("\"BF16\"");
    bytes.replace(at, 6, "\"I16\" ");
  });
  edit("retyped", [](std::string& bytes) { bytes.replace(bytes.find("\"BF16\""), 6, "\"F16\" "); });
  edit("overlapping", [](std::string& bytes) {
    const size_t at = bytes.find("\"data_offsets\":[0,");
    ASSERT_NE(at, std::string::npos);
    const size_t next = bytes.find("\"data_offsets\":[", at + 10) + 16;
    bytes[next] = bytes[next] == '1' ? '0' : '1';
  });
  ModelConfig other = config_;
  other.num_layers = 1;
  WriteModel(other, RandomWeights(other, 2), root_.File("other"));
  other = config_;
  other.eos_token_ids = {1, 3};
  WriteModel(other, RandomWeights(other, 2), root_.File("other_eos"));
  other = config_;
  other.max_position_embeddings /= 2;
  WriteModel(other, RandomWeights(other, 2), root_.File("other_context"));
  std::filesystem::copy(root_.File("v2"), root_.File("adapted"));
  root_.Write("adapted/adapter_config.json", "{}");
  TinyWeights nonfinite = RandomWeights(config_, 2);
  nonfinite.tensors.at("model.norm.weight")[5] = 0x7f80;
  WriteModel(config_, nonfinite, root_.File("nonfinite"));
  const testing_support::TempDir outside;
  testing_support::WriteTinyModel(config_, 2, outside.File("model"));
  std::filesystem::create_directory_symlink(outside.File("model"), root_.File("escape"));
  std::filesystem::copy(root_.File("v2"), root_.File("escaping_file"));
  std::filesystem::remove(root_.File("escaping_file/model.safetensors"));
  std::filesystem::create_symlink(outside.File("model/model.safetensors"),
                                  root_.File("escaping_file/model.safetensors"));
  std::filesystem::create_directory(root_.File("empty"));

  const auto engine = MakeEngine();
  const SampleResult expected = Generate(*engine, MakeRequest("r"));
  using absl::StatusCode;
  const struct {
    std::string path;
    StatusCode code;
    std::string message;
  } kCases[] = {
      {"missing", StatusCode::kInvalidArgument, "model.norm.weight"},
      {"truncated", StatusCode::kInvalidArgument, "model.safetensors"},
      {"oversized", StatusCode::kInvalidArgument, "model.safetensors"},
      {"mistyped", StatusCode::kInvalidArgument, "I16"},
      {"retyped", StatusCode::kInvalidArgument, "tensors are F16"},
      {"overlapping", StatusCode::kInvalidArgument, "model.safetensors"},
      {"other", StatusCode::kInvalidArgument, "num_layers=1, expected num_layers=2"},
      {"other_eos", StatusCode::kInvalidArgument, "state eos_token_ids=1,3"},
      {"other_context", StatusCode::kInvalidArgument, "expected eos_token_ids=1 max_position"},
      {"adapted", StatusCode::kInvalidArgument, "adapter_config.json"},
      {"nonfinite", StatusCode::kInvalidArgument, "\"model.norm.weight\": the value at [5]"},
      {"../v2", StatusCode::kInvalidArgument, ".."},
      {root_.File("v2"), StatusCode::kInvalidArgument, "absolute"},
      {"escape", StatusCode::kInvalidArgument, "outside"},
      {"escaping_file", StatusCode::kInvalidArgument, "outside"},
      {"", StatusCode::kInvalidArgument, "empty"},
      {"nowhere", StatusCode::kNotFound, "nowhere"},
      {"empty", StatusCode::kNotFound, "config.json"},
  };
  for (const auto& test : kCases) {
    EXPECT_THAT(Update(*engine, {.model_path = test.path}),
                StatusIs(test.code, HasSubstr(test.message)))
        << test.path;
  }
  EXPECT_EQ(engine->weight_version()->id, 1u);
  ExpectSameTokens(Generate(*engine, MakeRequest("r")), expected);
}

}  // namespace
}  // namespace isobit
