// The scorer on GPUs gives the CPU's bits, on one GPU and on shards that NCCL gathers, and ends
// when a GPU fails.
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/sm90/device/device_info.h"
#include "kernels/runtime/cuda_backend.h"
#include "tests/support/forwarding_backend.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_model.h"
#include "tests/trainer_bridge/scorer/scoring_fixture.h"

namespace isobit {
namespace {

using testing_support::StatusIs;

// Bits of each sequence's score, by index.
std::vector<int> Devices(int count) {
  std::vector<int> devices;
  for (int device = 0; device < count; ++device) devices.push_back(device);
  return devices;
}

// The numbers of shards that this machine has GPUs for.
std::vector<int> ShardCounts() {
  std::vector<int> counts;
  for (const int count : {1, 2, 4, 8}) {
    if (cuda::GetDeviceInfo(count - 1).ok()) counts.push_back(count);
  }
  return counts;
}

RankBackend CpuBackend() {
  return {.make_ops = [](int) { return MakeCpuBackend({.num_threads = 2}); }};
}

RankBackend OnGpus(int shards) {
  absl::StatusOr<RankBackend> backend =
      MakeCudaBackend({.devices = Devices(shards), .num_shards = shards});
  EXPECT_THAT(backend, testing_support::IsOk());
  return *std::move(backend);
}

// Ops that fail once they are told to.
class FailingOps final : public testing_support::ForwardingBackend {
 public:
  FailingOps(std::unique_ptr<Backend> ops, const std::atomic<bool>& fail)
      : ForwardingBackend(std::move(ops)), fail_(fail) {
    Replace<AttentionArgs>(*this);
  }
  absl::Status On(const AttentionArgs& args) {
    return fail_ ? absl::InternalError("the device is lost") : inner().Run(args);
  }

 private:
  const std::atomic<bool>& fail_;
};

class ScorerCudaTest : public testing::TestWithParam<Architecture> {
 protected:
  ScorerCudaTest() : config_(testing_support::TinyConfig(GetParam())) {
    testing_support::WriteTinyModel(config_, 11, dir_.File("model"));
    testing_support::WriteTinyModel(config_, 12, dir_.File("next"));
    options_.model_root = dir_.path();
    options_.max_batch_tokens = 4096;
  }

  void SetUp() override {
    if (const auto device = cuda::GetDeviceInfo(0); !device.ok()) {
      GTEST_SKIP() << "SKIPPED, no Hopper GPU: " << device.status().message();
    }
  }

  std::unique_ptr<Scorer> Load(int shards, RankBackend backend) {
    options_.num_shards = shards;
    options_.backend = std::move(backend);
    absl::StatusOr<std::unique_ptr<Scorer>> scorer = Scorer::Load(options_, "model");
    EXPECT_THAT(scorer, testing_support::IsOk());
    return std::move(*scorer);
  }

  const testing_support::TempDir dir_;
  const ModelConfig config_;
  ScorerOptions options_;
};

INSTANTIATE_TEST_SUITE_P(Architectures, ScorerCudaTest,
                         testing::Values(Architecture::kLlama, Architecture::kMistral,
                                         Architecture::kQwen2, Architecture::kQwen3),
                         [](const auto& info) { return ArchitectureName(info.param); });

// INVARIANT: a GPU scores with the CPU's bits, on any number of shards, in any batch and chunk.
TEST_P(ScorerCudaTest, ShardsOnGpusGiveTheCpusBits) {
  const std::vector<ScoreInput> inputs = RandomInputs(config_, 1, 24, 150);
  ScoreOptions raw = FullOptions();
  raw.raw = true;
  const std::vector<ScoreOptions> all_options = {FullOptions(), raw, ScoreOptions()};
  std::vector<AllBits> expected;
  const auto cpu = Load(1, CpuBackend());
  for (const ScoreOptions& options : all_options)
    expected.push_back(ScoreAll(*cpu, inputs, options));
  for (const int shards : ShardCounts()) {
    for (const int64_t max_batch_tokens : {1, 200, 4096}) {
      options_.max_batch_tokens = max_batch_tokens;
      options_.chunk_rows = max_batch_tokens == 200 ? 7 : 512;
      const auto gpu = Load(shards, OnGpus(shards));
      for (size_t i = 0; i < all_options.size(); ++i) {
        EXPECT_EQ(ScoreAll(*gpu, inputs, all_options[i]), expected[i])
            << shards << " shards, " << max_batch_tokens << " tokens, options " << i;
      }
      EXPECT_EQ(gpu->peak_blocks(), shards > 1 ? 2 : 0);
      EXPECT_EQ(gpu->resident_blocks(), 0);
    }
  }
}

// INVARIANT: sequences that share pages keep their bits on a GPU.
TEST_P(ScorerCudaTest, SharedPagesGiveTheCpusBits) {
  std::vector<ScoreInput> inputs = AlikeInputs(config_, 4);
  for (ScoreInput& input : AlikeInputs(config_, 5)) inputs.push_back(std::move(input));
  options_.prefix_sharing = false;
  const AllBits expected = ScoreAll(*Load(1, CpuBackend()), inputs, FullOptions());
  for (const int shards : ShardCounts()) {
    for (const bool sharing : {false, true}) {
      options_.prefix_sharing = sharing;
      const auto gpu = Load(shards, OnGpus(shards));
      EXPECT_EQ(ScoreAll(*gpu, inputs, FullOptions()), expected)
          << shards << " shards, " << (sharing ? "shared" : "not shared");
      EXPECT_EQ(ScoreAll(*gpu, inputs, FullOptions()), expected) << "again";
      EXPECT_EQ(gpu->work().shared_tokens > 0, sharing);
    }
  }
}

// Also with sequences before and after, whose bits a probe leaves as they were.
TEST_P(ScorerCudaTest, ProbesSeeWhatTheyDoOnTheCpu) {
  const std::vector<ScoreInput> inputs = RandomInputs(config_, 2, 8, 60);
  const std::vector<int32_t> tokens = {3, 14, 15, 92, 65, 35, 8, 9, 79, 32, 3};
  const ProbeWanted wanted = {.site = ProbeSite{1, ProbeOp::kGate}, .row = 7};
  const auto cpu = Load(1, CpuBackend());
  const ProbeReport expected = cpu->Probe(tokens, wanted)->report;
  const AllBits scored = ScoreAll(*cpu, inputs, FullOptions());
  EXPECT_FALSE(expected.values.empty());
  for (const int shards : ShardCounts()) {
    const auto gpu = Load(shards, OnGpus(shards));
    for (int round = 0; round < 2; ++round) {
      const auto probed = gpu->Probe(tokens, wanted);
      ISOBIT_ASSERT_OK(probed.status());
      EXPECT_EQ(probed->report, expected) << shards << " shards";
      EXPECT_EQ(ScoreAll(*gpu, inputs, FullOptions()), scored) << shards << " shards";
    }
    EXPECT_NE(gpu->Probe({tokens.data(), 10}, wanted)->report, expected) << "control";
  }
}

TEST_P(ScorerCudaTest, NewWeightsServeAfterAnUpdate) {
  const std::vector<ScoreInput> inputs = RandomInputs(config_, 2, 8, 60);
  const auto cpu = Load(1, CpuBackend());
  const AllBits before = ScoreAll(*cpu, inputs, FullOptions());
  ISOBIT_ASSERT_OK(cpu->UpdateWeights({.model_path = "next"}));
  const AllBits after = ScoreAll(*cpu, inputs, FullOptions());
  EXPECT_NE(WithoutVersions(before), WithoutVersions(after));
  for (const int shards : ShardCounts()) {
    const auto gpu = Load(shards, OnGpus(shards));
    EXPECT_EQ(ScoreAll(*gpu, inputs, FullOptions()), before) << shards << " shards";
    ISOBIT_ASSERT_OK(gpu->UpdateWeights({.model_path = "next"}));
    EXPECT_EQ(ScoreAll(*gpu, inputs, FullOptions()), after) << shards << " shards";
  }
}

// The other ranks end too, whether or not they wait for the failed one's blocks.
TEST_P(ScorerCudaTest, AFailedGpuEndsTheEngine) {
  const std::vector<ScoreInput> inputs = RandomInputs(config_, 3, 8, 60);
  for (const int shards : ShardCounts()) {
    std::atomic<bool> fail = false;
    std::promise<absl::Status> fault;
    options_.on_fault = [&](const absl::Status& status) { fault.set_value(status); };
    RankBackend backend = OnGpus(shards);
    const RankBackend plain = backend;
    backend.make_ops = [&](int rank) -> absl::StatusOr<std::unique_ptr<Backend>> {
      auto ops = plain.make_ops(rank);
      if (!ops.ok() || rank != shards - 1) return ops;
      return std::make_unique<FailingOps>(*std::move(ops), fail);
    };
    const auto gpu = Load(shards, backend);
    EXPECT_EQ(ScoreAll(*gpu, inputs, FullOptions()).size(), inputs.size());
    fail = true;
    const Submitted submitted = MakeJob(inputs, FullOptions());
    ISOBIT_ASSERT_OK(gpu->Submit(submitted.job));
    std::future<absl::Status> status = fault.get_future();
    ASSERT_EQ(status.wait_for(std::chrono::seconds(10)), std::future_status::ready);
    EXPECT_THAT(status.get(),
                StatusIs(absl::StatusCode::kInternal, testing::HasSubstr("the device is lost")));
    EXPECT_THAT(gpu->Submit(MakeJob(inputs, FullOptions()).job),
                StatusIs(absl::StatusCode::kUnavailable, testing::_));
  }
}

// Each layer writes pages that other sequences of the pass read, over those of the layer before. A
// sequence of one or two rows of its own takes the decode schedule, which would read them before
// they are written if the batch did not say so (Batch::writes_past).
TEST(ScorerCudaPagesTest, NoSequenceReadsPagesBeforeTheyAreWritten) {
  if (const auto device = cuda::GetDeviceInfo(0); !device.ok()) {
    GTEST_SKIP() << "SKIPPED, no Hopper GPU: " << device.status().message();
  }
  for (const int64_t head_dim : {64, 128}) {
    const testing_support::TempDir dir;
    ModelConfig config = testing_support::TinyConfig(Architecture::kQwen3);
    config.head_dim = head_dim;
    config.max_position_embeddings = 2048;
    testing_support::WriteTinyModel(config, 11, dir.File("model"));
    ScorerOptions options;
    options.model_root = dir.path();
    options.num_shards = 1;
    options.max_batch_tokens = 8192;
    options.backend = CpuBackend();
    ISOBIT_ASSERT_OK_AND_ASSIGN(const auto cpu, Scorer::Load(options, "model"));
    options.backend = OnGpus(1);
    ISOBIT_ASSERT_OK_AND_ASSIGN(const auto gpu, Scorer::Load(options, "model"));
    // Two batches of the same lengths: prompts of 1,024 tokens, each with sequences of one row,
    // which attention takes together, and of two.
    std::vector<std::vector<ScoreInput>> batches(2);
    std::vector<AllBits> expected;
    uint64_t seed = 0;
    for (std::vector<ScoreInput>& batch : batches) {
      std::mt19937_64 random(++seed);
      for (int prompt = 0; prompt < 3; ++prompt) {
        ScoreInput input;
        for (int i = 0; i < 1024; ++i) {
          input.prompt.push_back(static_cast<int32_t>(random() % 101));
        }
        for (int32_t i = 0; i < 12; ++i) {
          input.completion = {i};
          batch.push_back(input);
          batch.back().completion.resize(1 + static_cast<size_t>(i / 6), i);
        }
      }
      expected.push_back(ScoreAll(*cpu, batch, {.raw = true, .entropy = true}));
    }
    for (int round = 0; round < 40; ++round) {
      const size_t b = static_cast<size_t>(round) % 2;
      ASSERT_EQ(ScoreAll(*gpu, batches[b], {.raw = true, .entropy = true}), expected[b])
          << "head size " << head_dim << ", round " << round;
    }
    EXPECT_GT(gpu->work().shared_tokens, 0);
  }
}

}  // namespace
}  // namespace isobit
