// How many KV pages a runner takes and gives back, on ranks of the CPU backend.
#include "rollout/engine/model_runner.h"

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/model/kv_cache.h"
#include "kernels/runtime/host_executor.h"
#include "tests/support/faulty_rank.h"
#include "tests/support/status_matchers.h"
#include "tests/support/tiny_model.h"

namespace isobit {
namespace {

using ::testing::HasSubstr;
using testing_support::StatusIs;

constexpr int kRanks = 2;
constexpr int64_t kSequences = 3;

class ModelRunnerPagesTest : public testing::Test {
 protected:
  // A runner whose ranks may take `kv_bytes` together.
  absl::StatusOr<std::unique_ptr<ModelRunner>> Create(int64_t kv_bytes, int32_t num_pages) const {
    return Create(MakeHostRank([] { return MakeCpuBackend({}); }, kv_bytes), num_pages);
  }
  absl::StatusOr<std::unique_ptr<ModelRunner>> Create(MakeRank make_rank, int32_t num_pages) const {
    return ModelRunner::Create(config_,
                               {.tensor_parallel_size = kRanks,
                                .page_size = 4,
                                .num_pages = num_pages,
                                .max_positions = 18,
                                .make_rank = std::move(make_rank)},
                               kSequences, /*max_rows=*/64);
  }
  // Of one page, on all ranks together.
  int64_t page_bytes() const {
    return static_cast<int64_t>(KvCache::PageBytes(config_, *ShapeOfRank(config_, 0, 1), 4));
  }

  const ModelConfig config_ = testing_support::TinyConfig(Architecture::kQwen3);
};

TEST_F(ModelRunnerPagesTest, TakesAsManyAsFit) {
  ISOBIT_ASSERT_OK_AND_ASSIGN(const auto runner, Create(7 * page_bytes() + page_bytes() / 2, 0));
  EXPECT_EQ(runner->num_pages(), 7);
  EXPECT_EQ(runner->memory().kv_cache,  // rank 1 has two of three heads
            7 * KvCache::PageBytes(config_, *ShapeOfRank(config_, 1, kRanks), 4));
}

TEST_F(ModelRunnerPagesTest, TakesNoMoreThanCanBeInUse) {
  ISOBIT_ASSERT_OK_AND_ASSIGN(const auto runner, Create(int64_t{1} << 60, 0));
  EXPECT_EQ(runner->num_pages(), kSequences * 5);
}

TEST_F(ModelRunnerPagesTest, TakesTheGivenNumber) {
  ISOBIT_ASSERT_OK_AND_ASSIGN(const auto runner, Create(page_bytes(), 40));
  EXPECT_EQ(runner->num_pages(), 40);
}

TEST_F(ModelRunnerPagesTest, SaysThatNoneFits) {
  EXPECT_THAT(Create(page_bytes() - 1, 0).status(),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("--kv_cache_mb")));
}

// A decorator that hides a rank's cache would keep its memory taken.
TEST_F(ModelRunnerPagesTest, GivesBackWhatADecoratedRankHolds) {
  const testing_support::Fault never = {.rank = 1, .step = -1, .happen = nullptr};
  const MakeRank plain = MakeHostRank([] { return MakeCpuBackend({}); });
  std::vector<size_t> released;
  for (const MakeRank& make_rank : {plain, testing_support::WithFault(plain, never)}) {
    ISOBIT_ASSERT_OK_AND_ASSIGN(const auto runner, Create(make_rank, 40));
    const size_t cache = runner->memory().kv_cache;
    ISOBIT_ASSERT_OK_AND_ASSIGN(released.emplace_back(), runner->Release(/*weights=*/false));
    EXPECT_GT(cache, 0u);
    EXPECT_EQ(runner->memory().kv_cache, 0u);
    ISOBIT_ASSERT_OK(runner->RestoreKvCache());
    EXPECT_EQ(runner->memory().kv_cache, cache);
  }
  EXPECT_EQ(released[0], released[1]);
}

}  // namespace
}  // namespace isobit
