// Localise: which cause explains logprobs whose ops are equal, and what is refused. What it finds
// at real services is tested in tests/e2e/localise_test.py.
#include "trainer_bridge/comparator/localise.h"

#include <grpcpp/client_context.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "common/rpc/channel.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/isobit/status_convert.h"
#include "tests/support/status_matchers.h"
#include "tests/trainer_bridge/comparator/fake_upstreams.h"
#include "trainer_bridge/comparator/comparator_service.h"

namespace isobit {
namespace {

using testing::HasSubstr;
using testing_support::FakeRollout;
using testing_support::FakeScorer;
using testing_support::FakeServer;
using testing_support::StatusIs;

const std::vector<float> kOwn = {-1, -2, -3}, kOthers = {-1, -2.5f, -3}, kRaw = {-4, -5, -6},
                         kFaulty = {-1, -2, -3.5f};

TEST(JudgeLogprobsTest, NamesOneCause) {
  const auto judge = [](std::vector<float> rollout_said, std::vector<float> scorer_said,
                        std::vector<float> scorer_gives = kOwn) {
    const LogprobVerdict verdict = JudgeLogprobs(
        {std::move(rollout_said), std::move(scorer_said), kOwn, std::move(scorer_gives), kRaw});
    EXPECT_EQ(verdict.position.has_value(), verdict.cause != v1::DIFFERENCE_CAUSE_NONE);
    EXPECT_FALSE(verdict.explanation.empty());
    return std::pair(verdict.cause, verdict.position.value_or(99));
  };
  using Verdict = std::pair<v1::DifferenceCause, uint32_t>;
  const Verdict none = {v1::DIFFERENCE_CAUSE_NONE, 99};
  EXPECT_EQ(judge({}, {}), none);
  EXPECT_EQ(judge(kOwn, {}), none);
  EXPECT_EQ(judge(kOwn, kOwn), none);
  EXPECT_EQ(judge(kFaulty, {}), Verdict(v1::DIFFERENCE_CAUSE_ROLLOUT_STATE, 2));
  EXPECT_EQ(judge(kFaulty, kFaulty), Verdict(v1::DIFFERENCE_CAUSE_ROLLOUT_STATE, 2));
  EXPECT_EQ(judge(kOwn, kFaulty), Verdict(v1::DIFFERENCE_CAUSE_INPUT, 2));
  const v1::DifferenceCause parameters = v1::DIFFERENCE_CAUSE_SAMPLING_PARAMETERS;
  EXPECT_EQ(judge(kOwn, kOthers, kOthers), Verdict(parameters, 1));
  EXPECT_EQ(judge(kOwn, {}, kOthers), Verdict(parameters, 1));
  EXPECT_EQ(judge(kOthers, kOthers, kOthers), Verdict(parameters, 1));
  EXPECT_EQ(judge(kRaw, kOwn), Verdict(parameters, 0));
  EXPECT_EQ(judge(kOwn, kRaw), Verdict(parameters, 0));
  EXPECT_EQ(judge(kOwn, kOwn, kOthers), Verdict(parameters, 1));
  // Of bits, not of numbers.
  EXPECT_EQ(JudgeLogprobs({{-0.0f}, {}, {0.0f}, {0.0f}, {1.0f}}).cause,
            v1::DIFFERENCE_CAUSE_ROLLOUT_STATE);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(JudgeLogprobs({{nan}, {}, {nan}, {nan}, {1.0f}}).cause, v1::DIFFERENCE_CAUSE_NONE);
}

TEST(LocaliseTest, RefusesWhatCannotBeAsked) {
  FakeRollout rollout;  // without Probe
  FakeScorer scorer;
  FakeServer rollout_server(&rollout, v1::RolloutService::service_full_name());
  FakeServer scorer_server(&scorer, v1::ScorerService::service_full_name());
  ComparatorService comparator(
      std::make_shared<Upstreams>(rollout_server.address(), scorer_server.address()));
  FakeServer server(&comparator, v1::ComparatorService::service_full_name());
  const auto stub = v1::ComparatorService::NewStub(MakeChannel(server.address()));
  const auto call = [&](const v1::LocaliseRequest& request) {
    grpc::ClientContext context;
    v1::LocaliseResponse response;
    return FromGrpcStatus(stub->Localise(&context, request, &response));
  };
  v1::LocaliseRequest request;
  EXPECT_THAT(call(request),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("prompt_token_ids: none")));
  request.add_prompt_token_ids(1);
  request.add_completion_token_ids(2);
  request.mutable_scorer()->add_logprobs(-1);
  request.mutable_scorer()->add_logprobs(-1);
  EXPECT_THAT(call(request), StatusIs(absl::StatusCode::kInvalidArgument,
                                      HasSubstr("scorer.logprobs: 2 entries, expected none or 1")));
  request.clear_scorer();
  for (int i = 0; i < 2; ++i) {  // the first call's end frees the place of the second
    EXPECT_THAT(call(request),
                StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("rollout Probe: ")));
  }
}

}  // namespace
}  // namespace isobit
