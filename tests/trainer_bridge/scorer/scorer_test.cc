// The scoring engine: queue, ends of jobs, weight updates, faults.
#include "trainer_bridge/scorer/scorer.h"

#include <atomic>
#include <filesystem>
#include <future>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/status_macros.h"
#include "common/checkpoint/checkpoint.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/oracle/oracle_backend.h"
#include "tests/support/all_tensors.h"
#include "tests/support/forwarding_backend.h"
#include "tests/support/observed_packer.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_model.h"
#include "tests/trainer_bridge/scorer/hooked_ops.h"
#include "tests/trainer_bridge/scorer/pass_gate.h"
#include "tests/trainer_bridge/scorer/scoring_fixture.h"
#include "tools/random_model.h"

namespace isobit {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing_support::RandomWeights;
using testing_support::StatusIs;
using testing_support::TinyWeights;

// The memory of all devices together.
struct Meter {
  std::atomic<size_t> limit = std::numeric_limits<size_t>::max();
  std::atomic<size_t> bytes = 0;
  std::atomic<int> packed = 0;  // matrices
};

class MeteredDevice final : public HostDevice {
 public:
  explicit MeteredDevice(Meter& meter) : meter_(meter) {}

  absl::StatusOr<Memory> Allocate(size_t bytes) override {
    if (meter_.bytes.fetch_add(bytes) + bytes > meter_.limit) {
      meter_.bytes -= bytes;
      return absl::ResourceExhaustedError("no memory");
    }
    ISOBIT_ASSIGN_OR_RETURN(Memory memory, HostDevice::Allocate(bytes));
    std::byte* const data = memory.get();
    return Memory(data, [kept = std::make_shared<Memory>(std::move(memory)), bytes,
                         &meter = meter_](std::byte*) { meter.bytes -= bytes; });
  }
  absl::StatusOr<std::unique_ptr<ReleasableMemory>> AllocateReleasable(size_t bytes) override {
    ISOBIT_ASSIGN_OR_RETURN(Memory metered, Allocate(bytes));
    return std::make_unique<MeteredMemory>(std::move(metered), bytes);
  }

 private:
  // The scorer gives nothing back.
  class MeteredMemory final : public ReleasableMemory {
   public:
    MeteredMemory(Memory memory, size_t bytes) : memory_(std::move(memory)) {
      address_ = memory_.get();
      bytes_ = bytes;
      released_ = false;
    }
    absl::Status Release() override { return absl::UnimplementedError("metered"); }
    absl::Status Restore() override { return absl::UnimplementedError("metered"); }

   private:
    const Memory memory_;
  };

  Meter& meter_;
};

class MeteredOps final : public testing_support::ForwardingBackend {
 public:
  explicit MeteredOps(Meter& meter)
      : ForwardingBackend(MakeOracleBackend()),
        device_(meter),
        packer_(ForwardingBackend::packer(), [&meter] { ++meter.packed; }) {}
  Device& device() override { return device_; }
  const WeightPacker& packer() const override { return packer_; }

 private:
  MeteredDevice device_;
  const testing_support::ObservedPacker packer_;
};

RankBackend Metered(Meter& meter) {
  return {.make_ops = [&](int) { return std::make_unique<MeteredOps>(meter); },
          .make_device = [&](int) { return std::make_unique<MeteredDevice>(meter); }};
}

class ScorerTest : public testing::Test {
 protected:
  // Qwen3 does not tie embeddings: a damaged one affects only sequences with that token.
  ScorerTest() : config_(testing_support::TinyConfig(Architecture::kQwen3)) {
    testing_support::WriteTinyModel(config_, 1, dir_.File("first"));
    testing_support::WriteTinyModel(config_, 2, dir_.File("second"));
    options_.model_root = dir_.path();
    options_.max_batch_tokens = 64;
    options_.backend.make_ops = [this](int) {
      return std::make_unique<HookedOps>([this] { return gate_.Pass(); });
    };
    options_.on_fault = [this](const absl::Status& status) { fault_.set_value(status); };
  }

  std::unique_ptr<Scorer> Load(const std::string& model = "first") {
    absl::StatusOr<std::unique_ptr<Scorer>> scorer = Scorer::Load(options_, model);
    EXPECT_THAT(scorer, testing_support::IsOk());
    return std::move(*scorer);
  }

  Submitted Submit(Scorer& scorer, std::vector<ScoreInput> inputs, ScoreOptions options = {}) {
    Submitted submitted = MakeJob(std::move(inputs), std::move(options));
    ISOBIT_EXPECT_OK(scorer.Submit(submitted.job));
    return submitted;
  }

  // Waits until an update waits for its switch: from then on, a job that asks for version 2 is
  // held, not refused.
  Submitted WaitForSwitch(Scorer& scorer) {
    Submitted held;
    for (int i = 0; i < 6000; ++i) {
      held = MakeJob({probe_}, {.weight_version = 2});
      if (scorer.Submit(held.job).ok()) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return held;
  }

  // The score of one fixed sequence; its bits identify the weights.
  std::vector<uint32_t> Probe(Scorer& scorer) {
    const Submitted probe = Submit(scorer, {probe_});
    ISOBIT_EXPECT_OK(probe.collector->WaitUntilDone());
    std::vector<uint32_t> bits = Bits(probe.collector->scores().at(0));
    bits[0] = 0;  // the version, which the tests look at by itself
    return bits;
  }
  std::vector<uint32_t> ProbeByDefinition(const std::string& model) const {
    std::vector<uint32_t> bits = Bits(ScoreByDefinition(dir_.File(model), probe_, {}));
    bits[0] = 0;
    return bits;
  }

  const testing_support::TempDir dir_;
  const ModelConfig config_;
  const ScoreInput probe_ = {.prompt = {4, 5, 6}, .completion = {7, 8}};
  PassGate gate_;
  std::promise<absl::Status> fault_;
  ScorerOptions options_;
};

TEST_F(ScorerTest, LoadRefusesOptionsOutOfRange) {
  options_.num_shards = 0;
  EXPECT_THAT(Scorer::Load(options_, "first"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("shards")));
  options_.num_shards = 2;
  options_.max_context = config_.max_position_embeddings + 1;
  EXPECT_THAT(Scorer::Load(options_, "first"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("max_context")));
  options_.max_context = 0;
  options_.max_batch_tokens = 0;
  EXPECT_THAT(Scorer::Load(options_, "first"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("max_batch_tokens")));
  options_.max_batch_tokens = 1;
  EXPECT_THAT(Scorer::Load(options_, "absent"), StatusIs(absl::StatusCode::kNotFound));
  EXPECT_THAT(Scorer::Load(options_, "../first"), StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST_F(ScorerTest, APassNeedsNoMemoryThatWasNotTakenAtTheStart) {
  Meter meter;
  options_.backend = Metered(meter);
  const auto scorer = Load();
  meter.limit = meter.bytes.load();
  for (int seed = 1; seed <= 5; ++seed) {
    std::vector<ScoreInput> inputs = RandomInputs(config_, seed, 20, 48);
    for (ScoreInput& input : inputs) input.prompt.insert(input.prompt.end(), 16, 4);
    const Submitted pass = Submit(*scorer, std::move(inputs));
    ISOBIT_EXPECT_OK(pass.collector->WaitUntilDone());
  }
  EXPECT_EQ(meter.bytes, meter.limit);
}

TEST_F(ScorerTest, ASequenceThatMemoryLacksForEndsItsJobAlone) {
  Meter meter;
  options_.backend = Metered(meter);
  const auto scorer = Load();
  meter.limit = meter.bytes.load();
  const ScoreInput longer = {.prompt = std::vector<int32_t>(64, 4), .completion = {5}};
  const Submitted refused = Submit(*scorer, {longer});
  const Submitted beside = Submit(*scorer, {probe_});
  EXPECT_THAT(refused.collector->WaitUntilDone(),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("65 tokens"), HasSubstr("max_batch_tokens"))));
  ISOBIT_EXPECT_OK(beside.collector->WaitUntilDone());
  for (int i = 0; i < 4; ++i) EXPECT_EQ(Probe(*scorer), ProbeByDefinition("first"));
  meter.limit = std::numeric_limits<size_t>::max();
  ISOBIT_EXPECT_OK(Submit(*scorer, {longer}).collector->WaitUntilDone());
}

TEST_F(ScorerTest, LoadRefusesPassesThatDoNotFit) {
  Meter meter;
  options_.backend = Metered(meter);
  meter.limit = 100'000;
  EXPECT_THAT(Scorer::Load(options_, "first"),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("max_batch_tokens, 64")));
}

TEST_F(ScorerTest, ReportsShardsAndResidentBlocks) {
  const auto scorer = Load();
  EXPECT_EQ(scorer->resident_blocks(), 0);
  EXPECT_EQ(scorer->peak_blocks(), 0);
  Probe(*scorer);
  EXPECT_GE(scorer->peak_blocks(), 1);
  EXPECT_LE(scorer->peak_blocks(), 2);
  EXPECT_GT(scorer->largest_block_bytes(), 0u);
  options_.num_shards = 8;
  EXPECT_LT(Load()->shard_bytes(), scorer->shard_bytes() / 2);
}

TEST_F(ScorerTest, ARankRunsAllPassesOnOneThread) {
  static std::atomic<int> num_threads{0};
  struct Mark {
    Mark() { ++num_threads; }
  };
  options_.backend.make_ops = [](int) {
    return std::make_unique<HookedOps>([] {
      thread_local const Mark mark;
      return absl::OkStatus();
    });
  };
  const auto scorer = Load();
  for (int pass = 0; pass < 10; ++pass) {
    ISOBIT_EXPECT_OK(Submit(*scorer, {probe_, probe_}).collector->WaitUntilDone());
  }
  EXPECT_EQ(num_threads, options_.num_shards);
}

TEST_F(ScorerTest, AFullQueueRefuses) {
  options_.max_queued_sequences = 8;
  const auto scorer = Load();
  gate_.Close();
  const Submitted first = Submit(*scorer, RandomInputs(config_, 1, 5, 20));
  const Submitted refused = MakeJob(RandomInputs(config_, 2, 4, 20));
  EXPECT_THAT(scorer->Submit(refused.job), StatusIs(absl::StatusCode::kResourceExhausted,
                                                    AllOf(HasSubstr("9"), HasSubstr("8"))));
  const Submitted second = Submit(*scorer, RandomInputs(config_, 3, 3, 20));
  gate_.Open();
  ISOBIT_EXPECT_OK(first.collector->WaitUntilDone());
  ISOBIT_EXPECT_OK(second.collector->WaitUntilDone());
  EXPECT_FALSE(refused.collector->done());
}

TEST_F(ScorerTest, AnEndedJobIsNotWorkedOnAndOthersGoOn) {
  options_.num_shards = 1;
  options_.max_batch_tokens = 1;
  const auto scorer = Load();
  gate_.Close();
  const Submitted cancelled = Submit(*scorer, RandomInputs(config_, 1, 50, 20));
  ASSERT_TRUE(gate_.WaitForArrivals(1));
  const Submitted other = Submit(*scorer, {probe_});
  EXPECT_TRUE(cancelled.job->End(absl::CancelledError("gone")));
  scorer->Wake();
  gate_.Open();
  ISOBIT_EXPECT_OK(other.collector->WaitUntilDone());
  EXPECT_THAT(cancelled.collector->WaitUntilDone(), StatusIs(absl::StatusCode::kCancelled));
  EXPECT_TRUE(cancelled.collector->scores().empty());
}

TEST_F(ScorerTest, ASlowReceiverHoldsUpOnlyItsOwnJob) {
  options_.max_batch_tokens = 1;
  const auto scorer = Load();
  Submitted slow = MakeJob(RandomInputs(config_, 1, 6, 20));
  slow.collector->SetCanTakeMore(false);
  ISOBIT_ASSERT_OK(scorer->Submit(slow.job));
  const Submitted other = Submit(*scorer, RandomInputs(config_, 2, 6, 20));
  ISOBIT_EXPECT_OK(other.collector->WaitUntilDone());
  EXPECT_TRUE(slow.collector->scores().empty());
  slow.collector->SetCanTakeMore(true);
  scorer->Wake();
  ISOBIT_EXPECT_OK(slow.collector->WaitUntilDone());
  EXPECT_EQ(slow.collector->scores().size(), 6u);
}

TEST_F(ScorerTest, NonFiniteLogitsFailTheirJobAndNameThePlace) {
  TinyWeights weights = RandomWeights(config_, 1);
  constexpr uint16_t kNan = 0x7fc0;
  std::vector<uint16_t>& embedding = weights.tensors["model.embed_tokens.weight"];
  embedding[17 * static_cast<size_t>(config_.hidden_size)] = kNan;
  testing_support::WriteModel(config_, weights, dir_.File("damaged"));
  options_.load_policy.allow_nonfinite = true;
  const auto scorer = Load("damaged");
  const Submitted bad = Submit(*scorer, {{.prompt = {4}, .completion = {5}},
                                         {.prompt = {4, 5}, .completion = {6, 17, 7, 8}}});
  const Submitted good = Submit(*scorer, {probe_});
  EXPECT_THAT(bad.collector->WaitUntilDone(),
              StatusIs(absl::StatusCode::kInternal,
                       AllOf(HasSubstr("sequences[1]"), HasSubstr("position 4"))));
  ISOBIT_EXPECT_OK(good.collector->WaitUntilDone());
  EXPECT_EQ(Probe(*scorer), ProbeByDefinition("first"));
}

TEST_F(ScorerTest, AFaultEndsAllJobsOnceAndIsReported) {
  const auto scorer = Load();
  gate_.FailFromNowOn(absl::InternalError("device lost"));
  const Submitted job = Submit(*scorer, RandomInputs(config_, 1, 5, 20));
  EXPECT_THAT(job.collector->WaitUntilDone(),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("device lost")));
  EXPECT_THAT(fault_.get_future().get(), StatusIs(absl::StatusCode::kInternal));
  const auto faulty = StatusIs(absl::StatusCode::kUnavailable, HasSubstr("device lost"));
  EXPECT_THAT(scorer->Submit(MakeJob({probe_}).job), faulty);
  EXPECT_THAT(scorer->UpdateWeights({.model_path = "second"}).status(), faulty);
}

TEST_F(ScorerTest, StoppingEndsJobsInFlight) {
  auto scorer = Load();
  gate_.Close();
  const Submitted job = Submit(*scorer, RandomInputs(config_, 1, 5, 20));
  ASSERT_TRUE(gate_.WaitForArrivals(1));
  scorer->Stop();
  EXPECT_THAT(job.collector->WaitUntilDone(), StatusIs(absl::StatusCode::kUnavailable));
  gate_.Open();
  scorer.reset();
}

// ---- Weight updates

TEST_F(ScorerTest, AnUpdateSwitchesToTheNewWeights) {
  const auto scorer = Load();
  EXPECT_EQ(Probe(*scorer), ProbeByDefinition("first"));
  const std::string before = scorer->version().digest;
  ISOBIT_ASSERT_OK_AND_ASSIGN(const WeightUpdateResult result,
                              scorer->UpdateWeights({.model_path = "second"}));
  EXPECT_EQ(result.previous.id, 1u);
  EXPECT_EQ(result.previous.digest, before);
  EXPECT_EQ(result.current.id, 2u);
  EXPECT_NE(result.current.digest, before);
  EXPECT_EQ(scorer->version().id, 2u);
  EXPECT_EQ(Probe(*scorer), ProbeByDefinition("second"));
  ISOBIT_ASSERT_OK_AND_ASSIGN(
      const WeightUpdateResult back,
      scorer->UpdateWeights(
          {.model_path = "first", .weight_version = 40, .expected_digest = before}));
  EXPECT_EQ(back.current.id, 40u);
  EXPECT_EQ(Probe(*scorer), ProbeByDefinition("first"));
}

TEST_F(ScorerTest, AFailedUpdateLeavesTheOldWeights) {
  const auto scorer = Load();
  const auto expect_refused = [&](const WeightUpdate& update, absl::StatusCode code,
                                  const std::string& text) {
    EXPECT_THAT(scorer->UpdateWeights(update), StatusIs(code, HasSubstr(text)));
    EXPECT_EQ(scorer->version().id, 1u) << text;
    EXPECT_EQ(Probe(*scorer), ProbeByDefinition("first")) << text;
  };
  const auto damaged = [&](const std::string& name, const auto& damage) {
    TinyWeights weights = RandomWeights(config_, 2);
    damage(weights);
    testing_support::WriteModel(config_, weights, dir_.File(name));
    return WeightUpdate{.model_path = name};
  };
  const absl::StatusCode invalid = absl::StatusCode::kInvalidArgument;

  expect_refused({.model_path = "absent"}, absl::StatusCode::kNotFound, "absent");
  expect_refused({.model_path = "../first"}, invalid, "..");
  expect_refused({.model_path = "/etc"}, invalid, "absolute");
  std::filesystem::create_directory_symlink("/etc", dir_.File("link"));
  expect_refused({.model_path = "link"}, invalid, "outside");
  expect_refused({.model_path = "second", .weight_version = 1}, invalid, "weight_version");
  expect_refused({.model_path = "second", .expected_digest = std::string(64, '0')},
                 absl::StatusCode::kFailedPrecondition, std::string(64, '0'));
  expect_refused(
      damaged("missing", [](auto& weights) { weights.tensors.erase("model.norm.weight"); }),
      invalid, "model.norm.weight");
  expect_refused(damaged("none", [](auto& weights) { weights.tensors.clear(); }), invalid,
                 "missing tensors");

  ModelConfig other = config_;
  other.rope_theta = 5000;
  testing_support::WriteTinyModel(other, 2, dir_.File("other_theta"));
  expect_refused({.model_path = "other_theta"}, invalid, "rope_theta");
  other = config_;
  other.intermediate_size = 80;
  testing_support::WriteTinyModel(other, 2, dir_.File("other_shape"));
  expect_refused({.model_path = "other_shape"}, invalid, "intermediate_size");

  testing_support::WriteTinyModel(config_, 2, dir_.File("short"));
  const std::string file = dir_.File("short/model.safetensors");
  std::filesystem::resize_file(file, std::filesystem::file_size(file) - 2);
  expect_refused({.model_path = "short"}, invalid, "model.safetensors");
}

TEST_F(ScorerTest, WiderWeightsAreRoundedAsAtLoad) {
  // The second model's weights in fp32, each a little off the bf16 number that it rounds to.
  ISOBIT_ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(dir_.File("second")));
  const TensorSet narrow = testing_support::AllTensors(checkpoint);
  std::vector<std::vector<uint32_t>> elements;
  std::vector<Tensor> tensors;
  for (Tensor tensor : checkpoint.tensors()) {
    std::vector<uint16_t> bits(tensor.NumElements());
    narrow.Find(tensor.name)->ToBf16(bits.data());
    elements.emplace_back(bits.size());
    for (size_t i = 0; i < bits.size(); ++i) elements.back()[i] = uint32_t{bits[i]} << 16 | 0x7fff;
    tensor.dtype = DType::kF32;
    tensor.data = reinterpret_cast<const uint8_t*>(elements.back().data());
    tensor.size_bytes = elements.back().size() * sizeof(float);
    tensors.push_back(std::move(tensor));
  }
  testing_support::WriteTinyModel(config_, 2, dir_.File("wide"));
  ISOBIT_ASSERT_OK(WriteSafetensors(dir_.File("wide/model.safetensors"), tensors));

  const auto scorer = Load();
  ISOBIT_ASSERT_OK(scorer->UpdateWeights({.model_path = "wide"}));
  EXPECT_EQ(Probe(*scorer), ProbeByDefinition("second"));
  ISOBIT_ASSERT_OK(scorer->UpdateWeights({.model_path = "first"}));
  EXPECT_EQ(Probe(*scorer), ProbeByDefinition("first"));
}

TEST_F(ScorerTest, DummyWeightsAreUpdatedFromSeedToSeed) {
  ISOBIT_ASSERT_OK(MakeDummyModel(config_, 5, dir_.File("dummy5")));
  ISOBIT_ASSERT_OK(MakeDummyModel(config_, 6, dir_.File("dummy6")));
  ISOBIT_ASSERT_OK(MakeRandomModel(config_, 5, dir_.File("stored5")));
  ISOBIT_ASSERT_OK(MakeRandomModel(config_, 6, dir_.File("stored6")));
  options_.load_format = LoadFormat::kDummy;
  const auto scorer = Load("dummy5");
  EXPECT_EQ(Probe(*scorer), ProbeByDefinition("stored5"));
  ISOBIT_ASSERT_OK(scorer->UpdateWeights({.model_path = "dummy6"}));
  EXPECT_EQ(Probe(*scorer), ProbeByDefinition("stored6"));
  EXPECT_THAT(scorer->UpdateWeights({.model_path = "stored5"}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("load_format dummy")));
  EXPECT_EQ(Probe(*scorer), ProbeByDefinition("stored6"));
}

TEST_F(ScorerTest, WaitLetsJobsFinishUnderTheOldWeightsAndHoldsNewOnes) {
  options_.num_shards = 1;
  options_.max_batch_tokens = 1;
  const auto scorer = Load();
  gate_.Close();
  const Submitted old = Submit(*scorer, RandomInputs(config_, 1, 4, 20));
  ASSERT_TRUE(gate_.WaitForArrivals(1));
  auto update = std::async(std::launch::async, [&] {
    return scorer->UpdateWeights({.model_path = "second", .mode = InFlightMode::kWait});
  });
  const Submitted held = WaitForSwitch(*scorer);
  const Submitted stale = Submit(*scorer, {probe_}, {.weight_version = 1});
  EXPECT_EQ(scorer->version().id, 1u);
  gate_.Open();
  ISOBIT_ASSERT_OK_AND_ASSIGN(const WeightUpdateResult result, update.get());
  EXPECT_EQ(result.num_aborted, 0u);
  ISOBIT_EXPECT_OK(old.collector->WaitUntilDone());
  for (const auto& [index, score] : old.collector->scores()) EXPECT_EQ(score.version.id, 1u);
  ISOBIT_EXPECT_OK(held.collector->WaitUntilDone());
  EXPECT_EQ(held.collector->scores().at(0).version.id, 2u);
  EXPECT_THAT(stale.collector->WaitUntilDone(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("asked for 1"), HasSubstr("serving 2"))));
}

TEST_F(ScorerTest, AbortEndsJobsInFlight) {
  const auto scorer = Load();
  gate_.Close();
  const Submitted running = Submit(*scorer, RandomInputs(config_, 1, 4, 20));
  ASSERT_TRUE(gate_.WaitForArrivals(1));
  const Submitted waiting = Submit(*scorer, RandomInputs(config_, 2, 4, 20));
  auto update = std::async(std::launch::async, [&] {
    return scorer->UpdateWeights({.model_path = "second", .mode = InFlightMode::kAbort});
  });
  EXPECT_THAT(running.collector->WaitUntilDone(), StatusIs(absl::StatusCode::kAborted));
  EXPECT_THAT(waiting.collector->WaitUntilDone(), StatusIs(absl::StatusCode::kAborted));
  gate_.Open();
  ISOBIT_ASSERT_OK_AND_ASSIGN(const WeightUpdateResult result, update.get());
  EXPECT_EQ(result.num_aborted, 2u);
  EXPECT_EQ(Probe(*scorer), ProbeByDefinition("second"));
}

TEST_F(ScorerTest, AnAbandonedOrSecondUpdateChangesNothing) {
  const auto scorer = Load();
  gate_.Close();
  const Submitted job = Submit(*scorer, RandomInputs(config_, 1, 4, 20));
  ASSERT_TRUE(gate_.WaitForArrivals(1));
  std::atomic<bool> is_abandoned{false};
  auto update = std::async(std::launch::async, [&] {
    return scorer->UpdateWeights({.model_path = "second",
                                  .mode = InFlightMode::kWait,
                                  .is_abandoned = [&] { return is_abandoned.load(); }});
  });
  WaitForSwitch(*scorer);
  EXPECT_THAT(scorer->UpdateWeights({.model_path = "second"}),
              StatusIs(absl::StatusCode::kAborted, HasSubstr("in progress")));
  is_abandoned = true;
  scorer->Wake();
  EXPECT_THAT(update.get(), StatusIs(absl::StatusCode::kCancelled));
  gate_.Open();
  ISOBIT_EXPECT_OK(job.collector->WaitUntilDone());
  EXPECT_EQ(scorer->version().id, 1u);
  EXPECT_EQ(Probe(*scorer), ProbeByDefinition("first"));
}

TEST_F(ScorerTest, AnAbandonedUpdateStopsWhileItIsPrepared) {
  Meter meter;
  options_.backend = Metered(meter);
  const auto scorer = Load();
  EXPECT_EQ(Probe(*scorer), ProbeByDefinition("first"));
  const size_t bytes = meter.bytes;
  meter.packed = 0;
  EXPECT_THAT(scorer->UpdateWeights({.model_path = "second", .is_abandoned = [] { return true; }}),
              StatusIs(absl::StatusCode::kCancelled));
  EXPECT_EQ(meter.packed, 0);
  EXPECT_EQ(meter.bytes, bytes);
  EXPECT_EQ(scorer->version().id, 1u);
  EXPECT_EQ(Probe(*scorer), ProbeByDefinition("first"));
  ISOBIT_EXPECT_OK(scorer->UpdateWeights({.model_path = "second"}));
  EXPECT_GT(meter.packed, 0);
}

TEST_F(ScorerTest, AnotherVersionThanTheServingOneIsRefused) {
  const auto scorer = Load();
  EXPECT_THAT(scorer->Submit(MakeJob({probe_}, {.weight_version = 7}).job),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("asked for 7"), HasSubstr("serving 1"))));
  const Submitted right = Submit(*scorer, {probe_}, {.weight_version = 1});
  ISOBIT_EXPECT_OK(right.collector->WaitUntilDone());
}

}  // namespace
}  // namespace isobit
