// Steps in flight over ranks that compute nothing: which tokens come from the step before, and what
// each step keeps alive.
#include "rollout/engine/step_pipeline.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/rollout/engine/request_table_fixture.h"
#include "tests/support/status_matchers.h"
#include "tests/support/tiny_model.h"

namespace isobit {
namespace {

using testing::ElementsAre;

// A rank that stores the steps and always draws token 7. Depth 2.
class RecordingRank final : public RankExecutor {
 public:
  explicit RecordingRank(std::vector<ModelStep>& steps) : steps_(steps) {}
  std::string backend() const override { return "recording"; }
  int depth() const override { return 2; }
  absl::Status Launch(const ModelStep& step) override {
    steps_.push_back(step);
    return absl::OkStatus();
  }
  absl::Status Collect(ModelStep& step) override {
    for (LogProbResult& result : step.results) result.token = {.id = 7, .logprob = -1.0f};
    return absl::OkStatus();
  }
  absl::StatusOr<CacheSize> CacheThatFits(const CacheSize& most) const override {
    return CacheSize{.num_pages = 32, .page_size = most.page_size};
  }
  absl::Status AllocateKvCache(const CacheSize& /*size*/) override { return absl::OkStatus(); }
  RankMemory memory() const override { return {}; }
  bool has_variant() const override { return false; }
  ProbedRank* probed() override { return nullptr; }
  ResidentWeights* weights() override { return nullptr; }
  KvCache* kv_cache() override { return nullptr; }
  absl::Status Serve(const PreparedBlocks& /*prepared*/) override { return absl::OkStatus(); }

 private:
  std::vector<ModelStep>& steps_;
};

class StepPipelineTest : public RequestTableFixture {
 protected:
  void Launch() { ISOBIT_EXPECT_OK(pipeline_.Launch(table_.scheduler().Schedule())); }
  void CollectAndCommit() {
    ISOBIT_EXPECT_OK(pipeline_.Collect());
    pipeline_.Commit(table_);
    pipeline_.Retire();
    pipeline_.Keep(table_.ended());
    Deliver();
  }

  std::unique_ptr<ModelRunner> MakeRunner() {
    auto runner = ModelRunner::Create(
        testing_support::TinyConfig(Architecture::kQwen3),
        {.tensor_parallel_size = 1,
         .num_pages = 32,
         .max_positions = 64,
         .make_rank = [this](const RankOptions&) -> absl::StatusOr<std::unique_ptr<RankExecutor>> {
           return std::make_unique<RecordingRank>(steps_);
         }},
        4, 64);
    ISOBIT_EXPECT_OK(runner);
    return *std::move(runner);
  }

  std::vector<ModelStep> steps_;
  const std::unique_ptr<ModelRunner> runner_ = MakeRunner();
  StepPipeline pipeline_{*runner_, {}};
};

TEST_F(StepPipelineTest, AStepIsFedByTheOneInFlight) {
  Add("a");
  Add("b");
  Launch();
  EXPECT_EQ(pipeline_.num_in_flight(), 1u);
  EXPECT_FALSE(pipeline_.is_full());
  Launch();
  EXPECT_TRUE(pipeline_.is_full());
  EXPECT_THAT(steps_[0].feeds, ElementsAre(-1, -1));
  EXPECT_THAT(steps_[0].logit_rows, ElementsAre(4, 9));
  EXPECT_THAT(steps_[1].feeds, ElementsAre(0, 1));
  EXPECT_THAT(steps_[1].logit_rows, ElementsAre(0, 1));
  EXPECT_EQ(steps_[1].batch.sequences[1].first_position, 5);
  EXPECT_EQ(steps_[1].requests[1].sampling.position, 6u);
}

TEST_F(StepPipelineTest, ASequenceIsFedFromItsPlaceInTheStepBefore) {
  Add("a", MaxTokens(1));
  const auto b = Add("b");
  Launch();
  Launch();  // "a" cannot run beyond its only token
  EXPECT_THAT(steps_[1].feeds, ElementsAre(1));
  CollectAndCommit();
  Launch();
  EXPECT_THAT(steps_[2].feeds, ElementsAre(0));
  EXPECT_THAT(b->samples[0].tokens, ElementsAre(7));
}

TEST_F(StepPipelineTest, ATokenThatIsThereIsNotFed) {
  Add("a");
  Launch();
  CollectAndCommit();
  Launch();
  EXPECT_THAT(steps_[1].feeds, ElementsAre(-1));
  EXPECT_THAT(steps_[1].batch.ids, ElementsAre(7));
}

TEST_F(StepPipelineTest, DrawsForWhatHasEndedAreDropped) {
  const auto sink = Add("a");
  Launch();
  table_.AbortAll("enough");
  pipeline_.Keep(table_.ended());
  CollectAndCommit();
  EXPECT_TRUE(sink->samples[0].tokens.empty());
  EXPECT_EQ(sink->done, absl::OkStatus());
}

// INVARIANT: what has ended lives until every step launched before is retired.
TEST_F(StepPipelineTest, KeepsWhatStepsInFlightPointTo) {
  auto sink = Add("a");
  const std::weak_ptr<RecordingSink> of_request = sink;
  Launch();
  Launch();
  table_.AbortAll("enough");
  pipeline_.Keep(table_.ended());
  EXPECT_TRUE(table_.ended().requests.empty());
  Deliver();
  sink = nullptr;
  EXPECT_FALSE(of_request.expired());
  CollectAndCommit();
  EXPECT_FALSE(of_request.expired());
  CollectAndCommit();
  EXPECT_TRUE(of_request.expired());
}

TEST_F(StepPipelineTest, KeepsNothingWithoutStepsInFlight) {
  auto sink = Add("a");
  const std::weak_ptr<RecordingSink> of_request = sink;
  Launch();
  CollectAndCommit();
  table_.AbortAll("enough");
  pipeline_.Keep(table_.ended());
  Deliver();
  sink = nullptr;
  EXPECT_TRUE(of_request.expired());
}

TEST_F(StepPipelineTest, ADrainForgetsWhatWasDrawn) {
  const auto sink = Add("a");
  Launch();
  Launch();
  pipeline_.Drain();
  EXPECT_EQ(pipeline_.num_in_flight(), 0u);
  Deliver();
  EXPECT_TRUE(sink->samples[0].tokens.empty());
}

}  // namespace
}  // namespace isobit
