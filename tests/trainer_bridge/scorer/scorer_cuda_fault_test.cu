// A GPU fails in the middle of a pass, while its peers wait for its blocks: the engine reports it
// within seconds. A program of its own, since it cannot use the device afterwards.
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
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

__global__ void Trap() { __trap(); }

// Ops that make their GPU fail in the next attention once `die` is set.
class DyingOps final : public testing_support::ForwardingBackend {
 public:
  DyingOps(std::unique_ptr<Backend> ops, int device, const std::atomic<bool>& die)
      : ForwardingBackend(std::move(ops)), device_(device), die_(die) {
    Replace<AttentionArgs>(*this);
  }
  absl::Status On(const AttentionArgs& args) {
    const absl::Status status = inner().Run(args);
    if (die_ && cudaSetDevice(device_) == cudaSuccess) Trap<<<1, 1>>>();
    return status;
  }

 private:
  const int device_;
  const std::atomic<bool>& die_;
};

TEST(ScorerCudaFaultTest, ADeadGpuEndsTheEngineWithinSeconds) {
  int shards = 0;
  for (const int count : {1, 2, 4, 8}) {
    if (cuda::GetDeviceInfo(count - 1).ok()) shards = count;
  }
  if (shards == 0) GTEST_SKIP() << "SKIPPED, no Hopper GPU";
  const testing_support::TempDir dir;
  const ModelConfig config = testing_support::TinyConfig(Architecture::kQwen3);
  testing_support::WriteTinyModel(config, 1, dir.File("model"));
  std::vector<int> devices;
  for (int device = 0; device < shards; ++device) devices.push_back(device);
  const int last = shards - 1;
  ISOBIT_ASSERT_OK_AND_ASSIGN(const RankBackend plain,
                              MakeCudaBackend({.devices = devices, .num_shards = shards}));
  static std::atomic<bool> die = false;  // like what follows, it outlives a scorer that is left
  static std::promise<absl::Status> fault;
  ScorerOptions options;
  options.model_root = dir.path();
  options.num_shards = shards;
  options.on_fault = [](const absl::Status& status) { fault.set_value(status); };
  options.backend = plain;
  options.backend.make_ops = [plain, last](int rank) -> absl::StatusOr<std::unique_ptr<Backend>> {
    auto ops = plain.make_ops(rank);
    if (!ops.ok() || rank != last) return ops;
    return std::make_unique<DyingOps>(*std::move(ops), rank, die);
  };
  ISOBIT_ASSERT_OK_AND_ASSIGN(std::unique_ptr<Scorer> scorer, Scorer::Load(options, "model"));
  const std::vector<ScoreInput> inputs = RandomInputs(config, 1, 16, 80);
  const Submitted before = MakeJob(inputs);
  ISOBIT_ASSERT_OK(scorer->Submit(before.job));
  ISOBIT_EXPECT_OK(before.collector->WaitUntilDone());

  die = true;
  const Submitted during = MakeJob(inputs);
  ISOBIT_ASSERT_OK(scorer->Submit(during.job));
  std::future<absl::Status> ended = fault.get_future();
  ASSERT_EQ(ended.wait_for(std::chrono::seconds(10)), std::future_status::ready);
  EXPECT_THAT(ended.get(), StatusIs(absl::StatusCode::kInternal, testing::HasSubstr("cuda")));
  EXPECT_THAT(during.collector->WaitUntilDone(), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_THAT(scorer->Submit(MakeJob(inputs).job), StatusIs(absl::StatusCode::kUnavailable));
  scorer.release();  // as isobit-scorer does: its destructor may wait for the dead GPU
}

}  // namespace
}  // namespace isobit
