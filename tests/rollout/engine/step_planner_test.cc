// The rows and requests that the planner adds for a sequence.
#include "rollout/engine/step_planner.h"

#include <cstdint>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace isobit {
namespace {

using testing::ElementsAre;

constexpr int32_t kDraw = -1;

std::vector<int32_t> TargetsOf(const ModelStep& step) {
  std::vector<int32_t> targets;
  for (const LogProbRequest& request : step.requests) targets.push_back(request.target);
  return targets;
}

void ExpectRows(const SequenceRows& rows, int64_t first_row, int64_t num_rows,
                int64_t first_position) {
  EXPECT_EQ(rows.first_row, first_row);
  EXPECT_EQ(rows.num_rows, num_rows);
  EXPECT_EQ(rows.first_position, first_position);
}

void ExpectRequests(const PlannedRequests& planned, size_t first, size_t first_draw, size_t end) {
  EXPECT_EQ(planned.first, first);
  EXPECT_EQ(planned.first_draw, first_draw);
  EXPECT_EQ(planned.end, end);
}

const std::vector<int32_t> kTokens = {10, 11, 12, 13, 14};
constexpr int32_t kPages[] = {3, 1};

TEST(StepPlannerTest, APromptDrawsAfterItsLastRow) {
  ModelStep step;
  ExpectRequests(PlanSequence({.tokens = kTokens}, kPages, step), 0, 0, 1);
  EXPECT_EQ(step.batch.ids, kTokens);
  ExpectRows(step.batch.sequences.back(), 0, 5, 0);
  EXPECT_EQ(step.batch.sequences.back().pages, kPages);
  EXPECT_THAT(step.feeds, ElementsAre(-1));
  EXPECT_THAT(step.logit_rows, ElementsAre(4));
  EXPECT_THAT(TargetsOf(step), ElementsAre(kDraw));
}

TEST(StepPlannerTest, ANewTokenIsOneRow) {
  ModelStep step;
  ExpectRequests(PlanSequence({.tokens = kTokens, .num_cached = 4}, kPages, step), 0, 0, 1);
  EXPECT_THAT(step.batch.ids, ElementsAre(14));
  ExpectRows(step.batch.sequences.back(), 0, 1, 4);
  EXPECT_THAT(step.logit_rows, ElementsAre(0));
}

TEST(StepPlannerTest, AFedTokenComesAfterTheKnownOnes) {
  ModelStep step;
  ExpectRequests(PlanSequence({.tokens = kTokens, .num_cached = 5, .fed_by = 7}, kPages, step), 0,
                 0, 1);
  EXPECT_EQ(step.batch.ids.size(), 1u);
  ExpectRows(step.batch.sequences.back(), 0, 1, 5);
  EXPECT_THAT(step.feeds, ElementsAre(7));
  EXPECT_THAT(step.logit_rows, ElementsAre(0));
  EXPECT_THAT(TargetsOf(step), ElementsAre(kDraw));
}

TEST(StepPlannerTest, EachGuessIsARowAndADraw) {
  ModelStep step;
  const std::vector<int32_t> guesses = {20, 21, 22};
  ExpectRequests(
      PlanSequence({.tokens = kTokens, .num_cached = 4, .guesses = guesses}, kPages, step), 0, 0,
      4);
  EXPECT_THAT(step.batch.ids, ElementsAre(14, 20, 21, 22));
  ExpectRows(step.batch.sequences.back(), 0, 4, 4);
  EXPECT_THAT(step.logit_rows, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(TargetsOf(step), ElementsAre(kDraw, kDraw, kDraw, kDraw));
}

TEST(StepPlannerTest, AScoredTokenIsTheTargetOfTheRowBefore) {
  ModelStep step;
  ExpectRequests(PlanSequence({.tokens = kTokens, .num_cached = 1, .num_scored = 2}, kPages, step),
                 0, 2, 3);
  EXPECT_THAT(step.batch.ids, ElementsAre(11, 12, 13, 14));
  ExpectRows(step.batch.sequences.back(), 0, 4, 1);
  EXPECT_THAT(step.logit_rows, ElementsAre(1, 2, 3));
  EXPECT_THAT(TargetsOf(step), ElementsAre(13, 14, kDraw));
}

TEST(StepPlannerTest, DrawsThatShareARow) {
  ModelStep step;
  ExpectRequests(PlanSequence({.tokens = kTokens, .num_cached = 3}, kPages, step), 0, 0, 1);
  EXPECT_EQ(PlanDrawFromLastRow(step), 1u);
  EXPECT_EQ(PlanDrawFromLastRow(step), 2u);
  ExpectRequests(PlanSequence({.tokens = kTokens, .num_cached = 5, .fed_by = 1}, kPages, step), 3,
                 3, 4);
  EXPECT_EQ(step.batch.ids.size(), 3u);
  EXPECT_EQ(step.batch.sequences.size(), 2u);
  EXPECT_THAT(step.feeds, ElementsAre(-1, 1));
  EXPECT_THAT(step.logit_rows, ElementsAre(1, 1, 1, 2));
  EXPECT_THAT(TargetsOf(step), ElementsAre(kDraw, kDraw, kDraw, kDraw));

  step.page_copies.push_back({1, 2});
  step.batch.writes_past = true;
  ClearStep(step);
  EXPECT_TRUE(step.page_copies.empty() && !step.batch.writes_past);
}

TEST(StepPlannerTest, SequencesFollowOneAnother) {
  ModelStep step;
  const std::vector<int32_t> guesses = {20};
  ExpectRequests(PlanSequence({.tokens = kTokens, .num_scored = 1}, kPages, step), 0, 1, 2);
  ExpectRequests(PlanSequence({.tokens = kTokens, .num_cached = 5, .fed_by = 0}, kPages, step), 2,
                 2, 3);
  ExpectRequests(
      PlanSequence({.tokens = kTokens, .num_cached = 3, .guesses = guesses}, kPages, step), 3, 3,
      5);
  ExpectRows(step.batch.sequences[0], 0, 5, 0);
  ExpectRows(step.batch.sequences[1], 5, 1, 5);
  ExpectRows(step.batch.sequences[2], 6, 3, 3);
  EXPECT_EQ(step.batch.ids.size(), 9u);
  EXPECT_THAT(step.feeds, ElementsAre(-1, 0, -1));
  EXPECT_THAT(step.logit_rows, ElementsAre(3, 4, 5, 7, 8));
  EXPECT_THAT(TargetsOf(step), ElementsAre(14, kDraw, kDraw, kDraw, kDraw));

  const int32_t* const ids = step.batch.ids.data();
  ClearStep(step);
  EXPECT_TRUE(step.batch.ids.empty() && step.batch.sequences.empty() && step.feeds.empty() &&
              step.logit_rows.empty() && step.requests.empty());
  PlanSequence({.tokens = kTokens}, kPages, step);
  EXPECT_EQ(step.batch.ids.data(), ids);  // no allocation for the next step
}

TEST(StepPlannerDeathTest, RefusesWorkThatNoStepCanDo) {
  ModelStep empty;
  EXPECT_DEATH(PlanDrawFromLastRow(empty), "no draw to repeat");
  ModelStep step;
  const std::vector<int32_t> guesses = {20};
  EXPECT_DEATH(PlanSequence({.tokens = kTokens, .num_cached = 5}, kPages, step), "5 of 5 tokens");
  EXPECT_DEATH(PlanSequence({.tokens = kTokens, .num_cached = 4, .fed_by = 0}, kPages, step),
               "4 of 6 tokens");
  EXPECT_DEATH(PlanSequence({.tokens = kTokens, .num_cached = 3, .num_scored = 2}, kPages, step),
               "row before a scored token");
  EXPECT_DEATH(PlanSequence({.tokens = kTokens, .num_cached = 5, .fed_by = 0, .guesses = guesses},
                            kPages, step),
               "guesses after a token");
}

}  // namespace
}  // namespace isobit
