// Requests in the table, without an engine: queued, committed to, ended.
#include "rollout/engine/request_table.h"

#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/rollout/engine/request_table_fixture.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing_support::StatusIs;

class RequestTableTest : public RequestTableFixture {};

TEST_F(RequestTableTest, TakesNothingBeforeTheFirstWeights) {
  version_ = nullptr;
  EXPECT_THAT(table_.CheckQueue("a", 5),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("not loaded")));
}

TEST_F(RequestTableTest, RefusesAnIdInFlightUntilItHasEnded) {
  Add("a");
  EXPECT_THAT(table_.CheckQueue("a", 5), StatusIs(absl::StatusCode::kAlreadyExists));
  table_.AbortAll("enough");
  ISOBIT_EXPECT_OK(table_.CheckQueue("a", 5));
}

TEST_F(RequestTableTest, RefusesWhatTheQueueHasNoRoomFor) {
  ISOBIT_EXPECT_OK(table_.CheckQueue("a", 1000));  // an empty queue takes any one
  Add("a");
  ISOBIT_EXPECT_OK(table_.CheckQueue("b", kMaxWaitingTokens - 5));
  EXPECT_THAT(table_.CheckQueue("b", kMaxWaitingTokens - 4),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("5 tokens wait")));
  Add("b");
  EXPECT_THAT(table_.CheckQueue("c", 1),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("2 requests wait")));
}

TEST_F(RequestTableTest, TokensReachTheirSinkUntilTheLast) {
  const auto sink = Add("a", MaxTokens(2));
  Sequence& sequence = Schedule();
  Commit(sequence, 7);
  EXPECT_THAT(sink->samples[0].tokens, ElementsAre(7));
  EXPECT_EQ(sequence.tokens.back(), 7);
  EXPECT_FALSE(sink->done);
  Commit(sequence, 8);
  EXPECT_THAT(sink->samples[0].tokens, ElementsAre(7, 8));
  EXPECT_THAT(sink->samples[0].versions, ElementsAre(3, 3));
  ASSERT_TRUE(sink->samples[0].end);
  EXPECT_EQ(sink->samples[0].end->reason, FinishReason::kLength);
  EXPECT_EQ(sink->samples[0].end->num_prompt_tokens, 5u);
  EXPECT_EQ(sink->done, absl::OkStatus());
  EXPECT_EQ(table_.size(), 0u);
  EXPECT_EQ(table_.pages().num_free(), table_.pages().num_pages());
}

TEST_F(RequestTableTest, AStopTokenEndsItsSampleAlone) {
  SamplingParams sampling = Samples(2);
  sampling.stop_token_ids = {9};
  const auto sink = Add("a", sampling);
  Sequence& first = Schedule();
  Commit(first, 9);
  EXPECT_EQ(sink->samples[0].end->reason, FinishReason::kStop);
  EXPECT_EQ(sink->samples[0].end->stop_token, 9);
  EXPECT_FALSE(sink->done);
  EXPECT_EQ(table_.size(), 1u);
}

TEST_F(RequestTableTest, AResultThatIsNotFiniteFailsTheRequest) {
  const auto sink = Add("a", Samples(2));
  const auto other = Add("b");
  Sequence& sequence = Schedule();
  LogProbResult result;
  result.token = {.id = 7, .logprob = -std::numeric_limits<float>::infinity()};
  Commit(sequence, std::move(result));
  EXPECT_THAT(*sink->done, StatusIs(absl::StatusCode::kInternal, HasSubstr("not finite")));
  EXPECT_FALSE(other->done);
  EXPECT_THAT(table_.ids(), ElementsAre("b"));
}

TEST_F(RequestTableTest, AbortMarksAndEndDueEnds) {
  const auto a = Add("a", {}, "alice");
  const auto b = Add("b", {}, "bob");
  EXPECT_THAT(table_.Abort({"a", "b", "c"}, "alice"), ElementsAre("a"));
  EXPECT_THAT(table_.Abort({"a"}, std::nullopt), IsEmpty());  // marked already
  EXPECT_FALSE(a->done);
  EndDue(Clock::now());
  EXPECT_EQ(a->done, absl::OkStatus());
  EXPECT_EQ(a->samples[0].end->reason, FinishReason::kAbort);
  EXPECT_FALSE(b->done);
}

TEST_F(RequestTableTest, CancelIsByTicket) {
  const auto sink = Add("a");
  EXPECT_FALSE(table_.Cancel(last_ticket_ + 1, "gone"));
  EXPECT_TRUE(table_.Cancel(last_ticket_, "gone"));
  EndDue(Clock::now());
  EXPECT_EQ(sink->samples[0].end->abort_reason, "gone");
  EXPECT_FALSE(table_.Cancel(last_ticket_, "gone"));
}

TEST_F(RequestTableTest, ExpiryEndsWhatIsDue) {
  EXPECT_EQ(table_.next_expiry(), Clock::time_point::max());
  const auto late = Add("late", {}, "", std::chrono::hours(2));
  const auto soon = Add("soon", {}, "", std::chrono::hours(1));
  EndDue(Clock::now());
  EXPECT_FALSE(soon->done);
  EndDue(Clock::now() + std::chrono::minutes(90));
  EXPECT_EQ(soon->done, absl::OkStatus());
  EXPECT_FALSE(late->done);
  EXPECT_GT(table_.next_expiry(), Clock::now() + std::chrono::minutes(90));
}

TEST_F(RequestTableTest, AFailureEndsAllWithoutAnotherWord) {
  const auto a = Add("a");
  const auto b = Add("b");
  Schedule();
  table_.FailAll(absl::UnavailableError("device lost"));
  Deliver();
  for (const auto& sink : {a, b}) {
    EXPECT_THAT(*sink->done, StatusIs(absl::StatusCode::kUnavailable, "device lost"));
    EXPECT_FALSE(sink->samples[0].end);
  }
  EXPECT_EQ(table_.pages().num_free(), table_.pages().num_pages());
}

// INVARIANT: what a step in flight may point into outlives its end.
TEST_F(RequestTableTest, KeepsWhatHasEndedForThePipeline) {
  const auto sink = Add("a", MaxTokens(1));
  Sequence& sequence = Schedule();
  const SequenceSampling* const sampling = sequence.sampling.get();
  Commit(sequence, 7);
  ASSERT_EQ(table_.ended().requests.size(), 1u);
  EXPECT_EQ(table_.ended().requests[0]->samples[0].get(), &sequence);
  ASSERT_EQ(table_.ended().samplings.size(), 1u);
  EXPECT_EQ(table_.ended().samplings[0].get(), sampling);
}

TEST_F(RequestTableTest, CountsRequestsWithKeys) {
  Add("a");
  Add("b");
  EXPECT_EQ(table_.num_with_cache(), 0u);
  Schedule().num_cached = 0;  // of two
  EXPECT_EQ(table_.num_with_cache(), 1u);
}

}  // namespace
}  // namespace isobit
