// Compare, end to end over loopback: equal and unequal sides, refusals, faults, cancellation.
#include <grpcpp/client_context.h>

#include <bit>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/rpc/channel.h"
#include "gtest/gtest.h"
#include "proto/isobit/status_convert.h"
#include "tests/support/status_matchers.h"
#include "tests/support/wall_clock.h"
#include "tests/trainer_bridge/comparator/fake_upstreams.h"
#include "trainer_bridge/comparator/comparator_service.h"

namespace isobit {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing_support::FakeRollout;
using testing_support::FakeScorer;
using testing_support::FakeServer;
using testing_support::StatusIs;

// Everything that one Compare stream returned.
struct Comparison {
  absl::Status status;
  std::map<std::string, std::vector<v1::TokenGap>> gaps;  // by sequence
  std::map<std::string, v1::SequenceReport> reports;
  std::vector<v1::CompareSummary> summaries;
};

class CompareTest : public testing::Test {
 protected:
  CompareTest()
      : rollout_server_(&rollout_, v1::RolloutService::service_full_name()),
        scorer_server_(&scorer_, v1::ScorerService::service_full_name()) {
    Connect(rollout_server_.address(), scorer_server_.address());
  }

  void Connect(const std::string& rollout, const std::string& scorer,
               const ByteLimits& memory = {.total = 1 << 30},
               const std::shared_ptr<CallGate>& gate = CallGate::Create()) {
    comparator_server_.reset();
    comparator_ = std::make_unique<ComparatorService>(std::make_shared<Upstreams>(rollout, scorer),
                                                      memory, gate);
    comparator_server_ = std::make_unique<FakeServer>(
        comparator_.get(), v1::ComparatorService::service_full_name(), gate);
    stub_ = v1::ComparatorService::NewStub(MakeChannel(comparator_server_->address()));
  }

  static v1::CompareRequest Request(int prompts, uint32_t max_tokens) {
    v1::CompareRequest request;
    for (int i = 0; i < prompts; ++i) request.add_prompts()->add_token_ids(100 * i);
    request.mutable_sampling()->set_max_tokens(max_tokens);
    return request;
  }

  Comparison Compare(const v1::CompareRequest& request) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    auto reader = stub_->Compare(&context, request);
    Comparison result;
    v1::CompareEvent event;
    while (reader->Read(&event)) {
      EXPECT_TRUE(result.summaries.empty()) << "the summary must be last";
      if (event.has_gaps()) {
        const std::string& id = event.gaps().sequence_id();
        EXPECT_EQ(result.reports.count(id), 0u) << "gaps must precede the report of " << id;
        for (const v1::TokenGap& gap : event.gaps().gaps()) result.gaps[id].push_back(gap);
      } else if (event.has_sequence()) {
        const std::string& id = event.sequence().sequence_id();
        EXPECT_TRUE(result.reports.emplace(id, event.sequence()).second) << "two reports: " << id;
      } else {
        result.summaries.push_back(event.summary());
      }
    }
    result.status = FromGrpcStatus(reader->Finish(), context);
    return result;
  }

  FakeRollout rollout_;
  FakeScorer scorer_;
  FakeServer rollout_server_;
  FakeServer scorer_server_;
  std::unique_ptr<ComparatorService> comparator_;
  std::unique_ptr<FakeServer> comparator_server_;
  std::unique_ptr<v1::ComparatorService::Stub> stub_;
};

TEST_F(CompareTest, EndsWhatNeedsMoreMemoryThanItMay) {
  Connect(rollout_server_.address(), scorer_server_.address(),
          {.total = 400 << 10, .client_share = 0.5});
  const Comparison large = Compare(Request(1, 8000));
  EXPECT_THAT(large.status, StatusIs(absl::StatusCode::kResourceExhausted,
                                     HasSubstr("at most 204800 of one client")));
  EXPECT_TRUE(RetryAfter(large.status).has_value());
  v1::CompareRequest request = Request(40, 500);  // more in all, but not at one time
  request.set_max_concurrency(2);
  request.set_gap_detail(v1::GAP_DETAIL_NONE);
  // The server ends the previous call a moment after its client has the status.
  absl::Status next = Compare(request).status;
  for (int i = 0; i < 100 && !next.ok(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    next = Compare(request).status;
  }
  ISOBIT_EXPECT_OK(next) << "what was held is given back";
  request.mutable_prompts(0)->mutable_token_ids()->Resize(100'000, 1);
  const absl::Status never = Compare(request).status;
  EXPECT_THAT(never, StatusIs(absl::StatusCode::kResourceExhausted));
  EXPECT_FALSE(RetryAfter(never).has_value()) << "it alone is over the bound";
}

TEST_F(CompareTest, WhatIsOutOfBoundsIsNotAMatterOfQuotas) {
  const QuotaAmounts limits = {.requests = 2, .streams = 2, .tokens = 1000};
  Connect(rollout_server_.address(), scorer_server_.address(), {.total = 1 << 30},
          CallGate::Create({.quota = Quota::Create(limits, limits)}));
  const auto invalid = [&](const std::string& what, auto change) {
    v1::CompareRequest request = Request(3, 100);
    change(request);
    EXPECT_THAT(Compare(request).status,
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(what)));
  };
  constexpr uint32_t kMost = std::numeric_limits<uint32_t>::max();
  invalid("sampling.n", [](auto& r) { r.mutable_sampling()->set_n(17); });
  invalid("prompts times sampling.n", [](auto& r) { r.mutable_sampling()->set_n(kMost); });
  invalid("sampling.max_tokens", [](auto& r) { r.mutable_sampling()->set_max_tokens(8193); });
  invalid("sampling.max_tokens", [](auto& r) { r.mutable_sampling()->set_max_tokens(kMost); });
  invalid("max_concurrency", [](auto& r) { r.set_max_concurrency(kMost); });

  const absl::Status large = Compare(Request(3, 333)).status;  // 999, and a token of each prompt
  EXPECT_THAT(large,
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("takes 1002 tokens")));
  EXPECT_FALSE(RetryAfter(large).has_value());
  for (int i = 0; i < 5; ++i) ISOBIT_EXPECT_OK(Compare(Request(3, 332)).status);
}

TEST_F(CompareTest, EqualSidesGiveZeroOverEveryToken) {
  v1::CompareRequest request = Request(20, 300);
  request.mutable_sampling()->set_n(2);
  request.set_max_concurrency(3);
  const Comparison result = Compare(request);
  ISOBIT_ASSERT_OK(result.status);
  ASSERT_EQ(result.summaries.size(), 1u);
  const v1::CompareSummary& summary = result.summaries[0];
  EXPECT_EQ(summary.verdict(), v1::VERDICT_EQUAL);
  EXPECT_EQ(summary.num_sequences(), 40u);
  EXPECT_EQ(summary.num_unequal_sequences(), 0u);
  EXPECT_EQ(summary.statistics().num_tokens(), 12000u);
  EXPECT_EQ(summary.statistics().num_unequal(), 0u);
  EXPECT_EQ(summary.statistics().max_abs_dp(), 0.0);
  EXPECT_EQ(summary.statistics().kl_k3(), 0.0);
  EXPECT_FALSE(summary.has_first_divergence());
  EXPECT_EQ(summary.rollout().weight_version().digest(), "d1");
  EXPECT_EQ(summary.scorer().fingerprint().hex(), "f00d");

  EXPECT_EQ(result.reports.size(), 40u);
  const v1::SequenceReport& report = result.reports.at("19/1");
  EXPECT_EQ(report.prompt_index(), 19u);
  EXPECT_EQ(report.sample_index(), 1u);
  EXPECT_EQ(report.finish_reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(report.statistics().num_tokens(), 300u);
  const std::vector<v1::TokenGap>& gaps = result.gaps.at("19/1");
  ASSERT_EQ(gaps.size(), 300u);
  for (uint32_t i = 0; i < 300; ++i) {
    EXPECT_EQ(gaps[i].position(), i);
    EXPECT_EQ(gaps[i].token_id(), 1900 + 1 + i);
    EXPECT_EQ(gaps[i].rollout_bits(),
              std::bit_cast<uint32_t>(testing_support::FakeLogprob(i, 1901 + i)));
    EXPECT_EQ(gaps[i].rollout_bits(), gaps[i].scorer_bits());
    EXPECT_TRUE(gaps[i].equal());
    EXPECT_EQ(gaps[i].rollout_weight_version(), 1u);
  }
}

TEST_F(CompareTest, OneFlippedBitIsFoundWhereItIs) {
  scorer_.perturb = [](const std::string& id, uint32_t position, float logprob) {
    const bool flip = (id == "b/0" && position == 17) || (id == "c/0" && position == 3);
    return flip ? std::bit_cast<float>(std::bit_cast<uint32_t>(logprob) ^ 1u) : logprob;
  };
  v1::CompareRequest request = Request(3, 50);
  request.mutable_prompts(0)->set_prompt_id("a");
  request.mutable_prompts(1)->set_prompt_id("b");
  request.mutable_prompts(2)->set_prompt_id("c");
  request.set_gap_detail(v1::GAP_DETAIL_UNEQUAL);
  const Comparison result = Compare(request);
  ISOBIT_ASSERT_OK(result.status) << "a gap is a result, not an error";
  const v1::CompareSummary& summary = result.summaries.at(0);
  EXPECT_EQ(summary.verdict(), v1::VERDICT_UNEQUAL);
  EXPECT_EQ(summary.statistics().num_tokens(), 150u);
  EXPECT_EQ(summary.statistics().num_unequal(), 2u);
  EXPECT_EQ(summary.num_unequal_sequences(), 2u);
  EXPECT_EQ(summary.statistics().max_ulp_distance(), 1u);
  EXPECT_GT(summary.statistics().max_abs_dlogp(), 0.0);
  EXPECT_GT(summary.statistics().kl_k2(), 0.0);
  EXPECT_EQ(summary.first_divergence().sequence_id(), "b/0") << "in request order";
  EXPECT_EQ(summary.first_divergence().position(), 17u);
  EXPECT_FALSE(result.reports.at("a/0").has_first_divergence());
  ASSERT_EQ(result.gaps.size(), 2u) << "UNEQUAL streams unequal tokens alone";
  ASSERT_EQ(result.gaps.at("c/0").size(), 1u);
  const v1::TokenGap& gap = result.gaps.at("c/0")[0];
  EXPECT_EQ(gap.position(), 3u);
  EXPECT_EQ(gap.rollout_bits() ^ gap.scorer_bits(), 1u);
  EXPECT_FALSE(gap.equal());
}

TEST_F(CompareTest, NanIsAMismatchAndCounted) {
  scorer_.perturb = [](const std::string&, uint32_t position, float logprob) {
    return position == 0 ? std::numeric_limits<float>::quiet_NaN() : logprob;
  };
  v1::CompareRequest request = Request(1, 4);
  request.set_gap_detail(v1::GAP_DETAIL_NONE);
  const Comparison result = Compare(request);
  ISOBIT_ASSERT_OK(result.status);
  const v1::CompareSummary& summary = result.summaries.at(0);
  EXPECT_EQ(summary.verdict(), v1::VERDICT_UNEQUAL);
  EXPECT_EQ(summary.statistics().num_tokens(), 4u);
  EXPECT_EQ(summary.statistics().num_nan(), 1u);
  EXPECT_EQ(summary.statistics().num_unequal(), 1u);
  EXPECT_TRUE(result.gaps.empty());
}

// What both sides say in equal bits is streamed by UNEQUAL, too, if no token is drawn with it.
TEST_F(CompareTest, ImpossibleLogprobsAreToldByPlace) {
  const auto impossible = [](uint32_t position, float logprob) {
    return position == 2 ? -std::numeric_limits<float>::infinity() : logprob;
  };
  rollout_.perturb = impossible;
  scorer_.perturb = [=](const std::string&, uint32_t position, float logprob) {
    return impossible(position, logprob);
  };
  v1::CompareRequest request = Request(1, 4);
  request.set_gap_detail(v1::GAP_DETAIL_UNEQUAL);
  const Comparison result = Compare(request);
  ISOBIT_ASSERT_OK(result.status);
  EXPECT_EQ(result.summaries.at(0).verdict(), v1::VERDICT_IMPOSSIBLE);
  EXPECT_EQ(result.summaries.at(0).first_impossible().position(), 2u);
  ASSERT_EQ(result.gaps.size(), 1u);
  const v1::TokenGap& gap = result.gaps.begin()->second.at(0);
  EXPECT_EQ(gap.position(), 2u);
  EXPECT_TRUE(gap.equal());
  EXPECT_TRUE(gap.impossible());
}

TEST_F(CompareTest, NoTokensIsNoSuccess) {
  const Comparison result = Compare(Request(2, 0));
  ISOBIT_ASSERT_OK(result.status);
  EXPECT_EQ(result.summaries.at(0).verdict(), v1::VERDICT_NOTHING_COMPARED);
  EXPECT_EQ(result.summaries.at(0).num_sequences(), 2u);
  EXPECT_EQ(scorer_.num_scores, 0);
}

TEST_F(CompareTest, DifferentFingerprintsAreRefusedNamingBoth) {
  scorer_.info.mutable_fingerprint()->set_hex("beef");
  v1::CompareRequest request = Request(1, 4);
  request.set_allow_weight_mismatch(true);  // concerns weights alone
  EXPECT_THAT(Compare(request).status,
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("rollout has f00d"), HasSubstr("scorer has beef"))));
  EXPECT_EQ(rollout_.num_generates, 0);
}

// Of equal weights and arithmetic: logprobs depend on the end-of-sequence ids under min_tokens.
TEST_F(CompareTest, DifferentSettingsOfTheModelAreRefusedNamingBoth) {
  rollout_.info.mutable_fingerprint()->set_settings("eos_token_ids=1");
  scorer_.info.mutable_fingerprint()->set_settings("eos_token_ids=1,468");
  v1::CompareRequest request = Request(1, 4);
  request.set_allow_weight_mismatch(true);  // concerns weights alone
  EXPECT_THAT(Compare(request).status,
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("rollout has eos_token_ids=1,"),
                             HasSubstr("scorer has eos_token_ids=1,468"))));
  EXPECT_EQ(rollout_.num_generates, 0);
  scorer_.info.mutable_fingerprint()->set_settings("eos_token_ids=1");
  ISOBIT_EXPECT_OK(Compare(request).status);
}

TEST_F(CompareTest, DifferentDigestsAreRefusedUnlessAllowed) {
  scorer_.info.mutable_weight_version()->set_digest("d2");
  v1::CompareRequest request = Request(1, 4);
  EXPECT_THAT(Compare(request).status, StatusIs(absl::StatusCode::kFailedPrecondition,
                                                AllOf(HasSubstr("rollout has 1 (digest d1)"),
                                                      HasSubstr("scorer has 1 (digest d2)"))));
  EXPECT_EQ(rollout_.num_generates, 0);
  request.set_allow_weight_mismatch(true);
  const Comparison allowed = Compare(request);
  ISOBIT_ASSERT_OK(allowed.status);
  EXPECT_EQ(allowed.summaries.at(0).rollout().weight_version().digest(), "d1");
  EXPECT_EQ(allowed.summaries.at(0).scorer().weight_version().digest(), "d2");
}

// The weights change after the check at the start: only the tokens' versions show it.
TEST_F(CompareTest, TokensOfAnotherVersionAreRefusedNamingBoth) {
  rollout_.token_weight_version = 2;
  v1::CompareRequest request = Request(1, 4);
  EXPECT_THAT(Compare(request).status,
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("sequence 0/0"), HasSubstr("weight_versions[0]"),
                             HasSubstr("rollout has 2"), HasSubstr("scorer has 1"))));
  request.set_allow_weight_mismatch(true);
  const Comparison allowed = Compare(request);
  ISOBIT_ASSERT_OK(allowed.status);
  EXPECT_EQ(allowed.gaps.at("0/0")[0].rollout_weight_version(), 2u);
  EXPECT_EQ(allowed.gaps.at("0/0")[0].scorer_weight_version(), 1u);
}

TEST_F(CompareTest, DifferentLogprobModesAreRefused) {
  scorer_.mutate = [](v1::ScoreResponse& r) { r.set_logprob_mode(v1::LOGPROB_MODE_RAW); };
  EXPECT_THAT(Compare(Request(1, 4)).status,
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("LOGPROB_MODE_PROCESSED"), HasSubstr("LOGPROB_MODE_RAW"))));
}

TEST_F(CompareTest, MalformedScoresAreTheScorersFault) {
  scorer_.mutate = [](v1::ScoreResponse& r) { r.mutable_completion()->add_logprobs(-1); };
  EXPECT_THAT(Compare(Request(1, 4)).status,
              StatusIs(absl::StatusCode::kInternal, HasSubstr("scorer.logprobs: 5 entries")));
  scorer_.mutate = [](v1::ScoreResponse& r) { r.mutable_completion()->set_token_ids(2, 77); };
  EXPECT_THAT(Compare(Request(1, 4)).status,
              StatusIs(absl::StatusCode::kInternal, HasSubstr("token_ids[2]")));
}

TEST_F(CompareTest, RolloutFailureEndsItWithItsCodeMessageAndRetryHint) {
  rollout_.failure =
      WithRetryAfter(absl::ResourceExhaustedError("queue full"), std::chrono::milliseconds(40));
  const absl::Status status = Compare(Request(3, 4)).status;
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted,
                               AllOf(HasSubstr("rollout Generate"), HasSubstr("queue full"))));
  EXPECT_EQ(RetryAfter(status), std::chrono::milliseconds(40));
}

TEST_F(CompareTest, RolloutThatEndsEarlyIsAnError) {
  rollout_.truncate = true;
  EXPECT_THAT(Compare(Request(1, 4)).status,
              StatusIs(absl::StatusCode::kInternal, HasSubstr("before the sample was complete")));
}

TEST_F(CompareTest, ScorerFailureEndsItWithItsCodeAndMessage) {
  scorer_.failure = absl::InternalError("position 3: logit is not finite");
  EXPECT_THAT(Compare(Request(3, 4)).status,
              StatusIs(absl::StatusCode::kInternal,
                       AllOf(HasSubstr("scorer Score"), HasSubstr("position 3"))));
}

TEST_F(CompareTest, UnreachableServiceIsUnavailableAndNamed) {
  Connect(rollout_server_.address(), "127.0.0.1:1");
  EXPECT_THAT(Compare(Request(1, 4)).status,
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("scorer GetServerInfo")));
  Connect("127.0.0.1:1", scorer_server_.address());
  EXPECT_THAT(Compare(Request(1, 4)).status,
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("rollout GetServerInfo")));
}

TEST_F(CompareTest, BadRequestsNameFieldValueAndBound) {
  EXPECT_THAT(Compare(v1::CompareRequest()).status,
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("prompts: none")));
  v1::CompareRequest request = Request(1, 4);
  request.mutable_sampling()->set_n(0);
  EXPECT_THAT(Compare(request).status,
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("sampling.n: 0")));
  request.mutable_sampling()->set_n(17);
  EXPECT_THAT(Compare(request).status,
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("17, expected at most 16")));
  request.mutable_sampling()->set_n(4000000000u);
  EXPECT_THAT(Compare(request).status,
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("at most 65536")));
  request = Request(1, 4);
  request.set_max_concurrency(0);
  EXPECT_THAT(Compare(request).status,
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("max_concurrency: 0")));
  request = Request(1, 4);
  request.mutable_prompts(0)->set_prompt_id(std::string(257, 'x'));
  EXPECT_THAT(Compare(request).status,
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("prompts[0].prompt_id: 257")));
}

// Waits until `count` is at least `least`.
void WaitFor(const std::atomic<int>& count, int least) {
  for (int i = 0; i < 2000 && count < least; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_GE(count, least);
}

TEST_F(CompareTest, CancelReachesGenerateAndScore) {
  rollout_.hang = true;
  v1::CompareRequest request = Request(5, 4);
  request.set_max_concurrency(2);
  {
    grpc::ClientContext context;
    auto reader = stub_->Compare(&context, request);
    WaitFor(rollout_.num_generates, 2);
    context.TryCancel();
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
    WaitFor(rollout_.num_cancelled, 2);
  }
  EXPECT_EQ(rollout_.num_generates, 2) << "max_concurrency";

  rollout_.hang = false;
  scorer_.hang = true;
  grpc::ClientContext context;
  auto reader = stub_->Compare(&context, request);
  WaitFor(scorer_.num_scores, 2);
  context.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  WaitFor(scorer_.num_cancelled, 2);
}

TEST_F(CompareTest, FirstFailureCancelsTheOtherCalls) {
  scorer_.hang_first = true;
  scorer_.failure = absl::InternalError("position 3: logit is not finite");
  EXPECT_THAT(Compare(Request(2, 4)).status, StatusIs(absl::StatusCode::kInternal));
  EXPECT_EQ(scorer_.num_scores, 2);
  WaitFor(scorer_.num_cancelled, 1);
}

TEST_F(CompareTest, PassedDeadlineCancelsTheCallsToBothServices) {
  scorer_.hang = true;
  v1::CompareRequest request = Request(2, 4);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(300));
  auto reader = stub_->Compare(&context, request);
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  WaitFor(scorer_.num_cancelled, 2);
}

TEST_F(CompareTest, AStepOfTheWallClockEndsNothing) {
  // The first score comes with the step; the calls that follow begin after it.
  scorer_.mutate = [](v1::ScoreResponse&) {
    testing_support::SetWallClockAhead(std::chrono::hours(2));
  };
  v1::CompareRequest request = Request(8, 4);
  request.set_max_concurrency(1);
  const Comparison result = Compare(request);
  testing_support::SetWallClockAhead(std::chrono::seconds(0));
  ISOBIT_EXPECT_OK(result.status);
  EXPECT_EQ(result.reports.size(), 8u);
}

// The client reads nothing until the comparator can do nothing more without it.
TEST_F(CompareTest, SlowReaderHoldsBackTheWorkAndLosesNothing) {
  constexpr int kPrompts = 400;
  constexpr uint32_t kTokens = 1000;
  v1::CompareRequest request = Request(kPrompts, kTokens);
  request.set_max_concurrency(2);
  grpc::ClientContext context;
  auto reader = stub_->Compare(&context, request);
  int started = -1;
  while (started != rollout_.num_generates || started == 0) {
    started = rollout_.num_generates;
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
  }
  EXPECT_LT(started, kPrompts) << "nothing held the work back";
  v1::CompareEvent event;
  uint64_t gaps = 0;
  while (reader->Read(&event)) gaps += static_cast<uint64_t>(event.gaps().gaps_size());
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(gaps, uint64_t{kPrompts} * kTokens);
  EXPECT_EQ(event.summary().statistics().num_tokens(), uint64_t{kPrompts} * kTokens);
}

}  // namespace
}  // namespace isobit
