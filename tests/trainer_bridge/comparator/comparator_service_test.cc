// Record, Watch, GetServerInfo and draining.
#include "trainer_bridge/comparator/comparator_service.h"

#include <grpcpp/client_context.h>

#include <chrono>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/rpc/channel.h"
#include "gtest/gtest.h"
#include "proto/isobit/status_convert.h"
#include "tests/support/metric_value.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/trainer_bridge/comparator/fake_upstreams.h"

namespace isobit {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing_support::FakeRollout;
using testing_support::FakeScorer;
using testing_support::FakeServer;
using testing_support::MetricValue;
using testing_support::StatusIs;

class ComparatorServiceTest : public testing::Test {
 protected:
  absl::Status Record(const std::vector<v1::RecordRequest>& records, v1::CompareSummary* summary) {
    grpc::ClientContext context;
    auto writer = stub_->Record(&context, summary);
    for (const v1::RecordRequest& record : records) {
      if (!writer->Write(record)) break;
    }
    writer->WritesDone();
    return FromGrpcStatus(writer->Finish());
  }

  // A sequence with equal sides.
  static v1::RecordRequest Pair(const std::vector<float>& logprobs) {
    v1::RecordRequest record;
    for (v1::RecordSide* side : {record.mutable_rollout(), record.mutable_scorer()}) {
      side->mutable_fingerprint()->set_hex("f00d");
      for (size_t i = 0; i < logprobs.size(); ++i) {
        side->mutable_tokens()->add_token_ids(static_cast<uint32_t>(i));
        side->mutable_tokens()->add_logprobs(logprobs[i]);
        side->mutable_tokens()->add_weight_versions(5);
      }
    }
    return record;
  }

  FakeRollout rollout_;
  FakeScorer scorer_;
  FakeServer rollout_server_{&rollout_, v1::RolloutService::service_full_name()};
  FakeServer scorer_server_{&scorer_, v1::ScorerService::service_full_name()};
  const std::shared_ptr<Metrics> metrics_ = std::make_shared<Metrics>();
  ComparatorService comparator_{
      std::make_shared<Upstreams>(rollout_server_.address(), scorer_server_.address()),
      {.total = 1 << 30},
      CallGate::Create(),
      metrics_};
  FakeServer comparator_server_{&comparator_, v1::ComparatorService::service_full_name()};
  std::unique_ptr<v1::ComparatorService::Stub> stub_ =
      v1::ComparatorService::NewStub(MakeChannel(comparator_server_.address()));
};

TEST_F(ComparatorServiceTest, RecordComparesWhatItIsGiven) {
  v1::RecordRequest unequal = Pair({-1, -2, -3});
  unequal.set_sequence_id("second");
  unequal.mutable_scorer()->mutable_tokens()->set_logprobs(2, -3.5f);
  unequal.mutable_scorer()->mutable_tokens()->set_logprobs(1,
                                                           std::numeric_limits<float>::quiet_NaN());
  v1::CompareSummary summary;
  ISOBIT_ASSERT_OK(Record({Pair({-1, -2}), unequal}, &summary));
  EXPECT_EQ(summary.verdict(), v1::VERDICT_UNEQUAL);
  EXPECT_EQ(summary.num_sequences(), 2u);
  EXPECT_EQ(summary.num_unequal_sequences(), 1u);
  EXPECT_EQ(summary.statistics().num_tokens(), 5u);
  EXPECT_EQ(summary.statistics().num_unequal(), 2u);
  EXPECT_EQ(summary.statistics().num_nan(), 1u);
  EXPECT_TRUE(std::isnan(summary.statistics().mean_abs_dlogp())) << "a NaN does not vanish";
  EXPECT_EQ(summary.first_divergence().sequence_id(), "second");
  EXPECT_EQ(summary.first_divergence().position(), 1u);
  EXPECT_EQ(summary.rollout().fingerprint().hex(), "f00d");

  EXPECT_EQ(MetricValue(*metrics_, "isobit_sequences_compared_total"), 2);
  EXPECT_EQ(MetricValue(*metrics_, "isobit_tokens_compared_total"), 5);
  EXPECT_EQ(MetricValue(*metrics_, "isobit_token_mismatches_total", {{"kind", "bits"}}), 1);
  EXPECT_EQ(MetricValue(*metrics_, "isobit_token_mismatches_total", {{"kind", "nan"}}), 1);
  EXPECT_EQ(MetricValue(*metrics_, "isobit_impossible_logprobs_total"), 1);
  for (const char* kl : {"isobit_kl_k1", "isobit_kl_k2", "isobit_kl_k3"}) {
    EXPECT_TRUE(std::isnan(MetricValue(*metrics_, kl))) << kl;
  }
  EXPECT_EQ(MetricValue(*metrics_, "isobit_logprob_ulp_max"),
            summary.statistics().max_ulp_distance());
}

// A finished Compare call lives on until the scorer's stream ends, which may be after main returns.
TEST_F(ComparatorServiceTest, ARecordingIsSealedThoughAnUpstreamLingers) {
  const testing_support::TempDir dir;
  const std::string path = dir.File("run.jsonl");
  scorer_.linger = true;
  {
    ComparatorService comparator(
        std::make_shared<Upstreams>(rollout_server_.address(), scorer_server_.address()),
        {.total = 1 << 30}, CallGate::Create(), metrics_);
    ISOBIT_ASSERT_OK(comparator.StartRecording({.path = path}));
    const FakeServer server(&comparator, v1::ComparatorService::service_full_name());
    const auto stub = v1::ComparatorService::NewStub(MakeChannel(server.address()));
    v1::CompareRequest request;
    request.add_prompts()->add_token_ids(7);
    request.mutable_sampling()->set_max_tokens(2);
    grpc::ClientContext context;
    const auto events = stub->Compare(&context, request);
    for (v1::CompareEvent event; events->Read(&event);) {
    }
    ISOBIT_ASSERT_OK(FromGrpcStatus(events->Finish()));
  }
  std::ifstream file(path);
  std::string sample, seal;
  ASSERT_TRUE(std::getline(file, sample) && std::getline(file, seal)) << "no seal";
  EXPECT_THAT(seal, HasSubstr("\"samples\""));
  EXPECT_EQ(scorer_.num_cancelled, 0) << "the scorer's stream is open";
}

TEST_F(ComparatorServiceTest, ALogprobThatNoTokenIsDrawnWithIsAVerdictOfItsOwn) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  int seen = 0;
  for (const float odd : {-kInf, kInf, 5.0f}) {
    v1::CompareSummary summary;
    ISOBIT_ASSERT_OK(Record({Pair({-1, -2}), Pair({-1, odd, odd})}, &summary));
    EXPECT_EQ(summary.verdict(), v1::VERDICT_IMPOSSIBLE) << odd;
    EXPECT_EQ(summary.statistics().num_unequal(), 0u);
    EXPECT_EQ(summary.statistics().num_impossible(), 2u);
    EXPECT_EQ(summary.first_impossible().sequence_id(), "1");
    EXPECT_EQ(summary.first_impossible().position(), 1u);
    EXPECT_EQ(MetricValue(*metrics_, "isobit_impossible_logprobs_total"), seen += 2);
  }
  v1::RecordRequest one_side = Pair({-1, -2});
  one_side.mutable_rollout()->mutable_tokens()->set_logprobs(0, -kInf);
  v1::CompareSummary summary;
  ISOBIT_ASSERT_OK(Record({one_side}, &summary));
  EXPECT_EQ(summary.verdict(), v1::VERDICT_UNEQUAL);
  EXPECT_EQ(summary.statistics().num_impossible(), 1u);
}

TEST_F(ComparatorServiceTest, RecordOfNothingProvesNothing) {
  v1::CompareSummary summary;
  ISOBIT_ASSERT_OK(Record({}, &summary));
  EXPECT_EQ(summary.verdict(), v1::VERDICT_NOTHING_COMPARED);
}

TEST_F(ComparatorServiceTest, RecordRefusesWhatCannotBeCompared) {
  v1::CompareSummary summary;
  v1::RecordRequest record = Pair({-1, -2});
  record.mutable_scorer()->mutable_fingerprint()->set_hex("beef");
  EXPECT_THAT(Record({Pair({-1}), record}, &summary),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("record 1"), HasSubstr("f00d"), HasSubstr("beef"))));
  record = Pair({-1, -2});
  record.mutable_rollout()->clear_fingerprint();
  record.mutable_scorer()->clear_fingerprint();
  EXPECT_THAT(Record({record}, &summary),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("rollout has none")));
  record = Pair({-1, -2});
  record.mutable_scorer()->mutable_tokens()->set_weight_versions(1, 6);
  EXPECT_THAT(Record({record}, &summary),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("weight_versions[1]"), HasSubstr("rollout has 5"),
                             HasSubstr("scorer has 6"))));
  record.set_allow_weight_mismatch(true);
  ISOBIT_EXPECT_OK(Record({record}, &summary));
  record = Pair({-1, -2});
  record.mutable_rollout()->mutable_tokens()->clear_logprobs();
  EXPECT_THAT(Record({record}, &summary),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("rollout.logprobs: 0")));
}

TEST_F(ComparatorServiceTest, WatchStreamsWindowAndTotal) {
  grpc::ClientContext context;
  v1::WatchRequest request;
  request.set_interval_ms(20);
  request.set_window_sequences(2);
  auto reader = stub_->Watch(&context, request);
  v1::WatchResponse response;
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.total().verdict(), v1::VERDICT_NOTHING_COMPARED);

  v1::RecordRequest unequal = Pair({-1});
  unequal.mutable_scorer()->mutable_tokens()->set_logprobs(0, -2);
  v1::CompareSummary summary;
  ISOBIT_ASSERT_OK(Record({unequal, Pair({-1, -2}), Pair({-3})}, &summary));
  do {
    ASSERT_TRUE(reader->Read(&response));
  } while (response.total().num_sequences() < 3);
  EXPECT_EQ(response.total().statistics().num_tokens(), 4u);
  EXPECT_EQ(response.total().verdict(), v1::VERDICT_UNEQUAL);
  EXPECT_EQ(response.window().num_sequences(), 2u);
  EXPECT_EQ(response.window().statistics().num_tokens(), 3u);
  EXPECT_EQ(response.window().verdict(), v1::VERDICT_EQUAL) << "the unequal one has left";
  context.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(ComparatorServiceTest, WatchRefusesBadRanges) {
  for (const auto& [interval, window, text] : {std::tuple{9u, 1u, "interval_ms: 9"},
                                               {3600001u, 1u, "interval_ms: 3600001"},
                                               {10u, 0u, "window_sequences: 0"},
                                               {10u, 4097u, "window_sequences: 4097"}}) {
    grpc::ClientContext context;
    v1::WatchRequest request;
    request.set_interval_ms(interval);
    request.set_window_sequences(window);
    EXPECT_THAT(FromGrpcStatus(stub_->Watch(&context, request)->Finish()),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)));
  }
}

TEST_F(ComparatorServiceTest, DrainEndsWatchesAndRefusesNewCalls) {
  grpc::ClientContext context;
  v1::WatchResponse response;
  auto reader = stub_->Watch(&context, v1::WatchRequest());
  ASSERT_TRUE(reader->Read(&response));
  comparator_.BeginDrain();
  EXPECT_FALSE(reader->Read(&response));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  grpc::ClientContext late;
  EXPECT_EQ(stub_->Watch(&late, v1::WatchRequest())->Finish().error_code(),
            grpc::StatusCode::UNAVAILABLE);
  grpc::ClientContext compare, localise;
  v1::CompareRequest comparison;
  comparison.add_prompts()->add_token_ids(1);
  EXPECT_EQ(stub_->Compare(&compare, comparison)->Finish().error_code(),
            grpc::StatusCode::UNAVAILABLE);
  v1::CompareSummary summary;
  EXPECT_THAT(Record({Pair({-1})}, &summary), StatusIs(absl::StatusCode::kUnavailable));
  v1::LocaliseRequest where;
  where.add_prompt_token_ids(1);
  v1::LocaliseResponse found;
  EXPECT_EQ(stub_->Localise(&localise, where, &found).error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(ComparatorServiceTest, ServerInfoDescribesBothSidesAndTheObstacle) {
  v1::ComparatorServerInfo info;
  {
    grpc::ClientContext context;
    ASSERT_TRUE(stub_->GetServerInfo(&context, v1::GetServerInfoRequest(), &info).ok());
  }
  EXPECT_EQ(info.version(), ISOBIT_VERSION);
  EXPECT_EQ(info.rollout().server().fingerprint().hex(), "f00d");
  EXPECT_EQ(info.scorer().server().weight_version().digest(), "d1");
  EXPECT_EQ(info.obstacle(), "");

  scorer_.info.mutable_weight_version()->set_id(9);
  grpc::ClientContext context;
  ASSERT_TRUE(stub_->GetServerInfo(&context, v1::GetServerInfoRequest(), &info).ok());
  EXPECT_THAT(info.obstacle(), AllOf(HasSubstr("rollout has 1"), HasSubstr("scorer has 9")));
}

}  // namespace
}  // namespace isobit
