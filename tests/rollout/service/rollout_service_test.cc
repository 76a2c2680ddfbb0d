// The rollout service over real connections: what it answers, streams, and refuses.
#include "rollout/service/rollout_service.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/isobit/status_convert.h"
#include "tests/rollout/service/service_fixture.h"
#include "tests/support/bitwise.h"
#include "tests/support/metric_value.h"
#include "tests/support/status_matchers.h"
#include "tests/support/tiny_model.h"

namespace isobit {
namespace {

using absl::StatusCode;
using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing_support::BitwiseEqual;
using testing_support::MetricValue;
using testing_support::StatusIs;
using Stub = v1::RolloutService::Stub;

// The parameter: the depth of the ranks.
class RolloutServiceTest : public ServiceFixture, public testing::WithParamInterface<int> {
 protected:
  RolloutServiceTest() { depth_ = GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Depth, RolloutServiceTest, testing::Values(1, 2),
                         testing::PrintToStringParamName());

TEST_P(RolloutServiceTest, StreamsTokensThenTheEndOfTheSample) {
  StartServer();
  v1::GenerateRequest request = MakeProto("mine");
  request.mutable_sampling()->set_logprobs(2);
  const Generated generated = Generate(request);
  ISOBIT_ASSERT_OK(generated.status);
  EXPECT_EQ(generated.request_id, "mine");
  const v1::TokenLogprobs& tokens = generated.tokens.at(0);
  EXPECT_EQ(tokens.token_ids_size(), 8);
  EXPECT_EQ(tokens.logprobs_size(), 8);
  EXPECT_THAT(tokens.weight_versions(), Each(1u));
  ASSERT_EQ(tokens.top_size(), 8);
  EXPECT_EQ(tokens.top(0).token_ids_size(), 2);
  EXPECT_EQ(tokens.top(0).logprobs_size(), 2);

  const v1::GenerateComplete& complete = generated.complete.at(0);
  EXPECT_EQ(complete.finish_reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_FALSE(complete.has_stop_token_id());
  EXPECT_EQ(complete.num_prompt_tokens(), 5u);
  EXPECT_EQ(complete.num_completion_tokens(), 8u);
  EXPECT_EQ(complete.seed(), 11u);
  EXPECT_EQ(complete.logprob_mode(), v1::LOGPROB_MODE_PROCESSED);
  EXPECT_EQ(complete.fingerprint().hex().size(), 64u);
  EXPECT_EQ(complete.weight_version().id(), 1u);
  EXPECT_EQ(complete.weight_version().digest().size(), 64u);

  EXPECT_NE(Generate(MakeProto()).request_id, Generate(MakeProto()).request_id)
      << "the server names requests that bring no name";
}

TEST_P(RolloutServiceTest, MetricsAgreeWithWhatCallsAnswer) {
  StartServer();
  EXPECT_EQ(MetricValue(*metrics_, "isobit_tokens_generated_total"), 0);
  v1::GenerateRequest request = MakeProto();
  request.mutable_sampling()->set_n(3);
  ISOBIT_ASSERT_OK(Generate(request).status);
  EXPECT_EQ(MetricValue(*metrics_, "isobit_tokens_generated_total"), 3 * 8);
  EXPECT_EQ(MetricValue(*metrics_, "isobit_requests_running"), 0);
  const v1::GetLoadResponse load = GetLoad();
  EXPECT_GT(load.num_free_pages(), 0u);
  EXPECT_EQ(MetricValue(*metrics_, "isobit_kv_pages", {{"state", "free"}}), load.num_free_pages());
  EXPECT_EQ(MetricValue(*metrics_, "isobit_kv_pages", {{"state", "used"}}), load.num_used_pages());
  v1::RolloutServerInfo info;
  ISOBIT_ASSERT_OK(Call(&Stub::GetServerInfo, *stub_, v1::GetServerInfoRequest(), info));
  EXPECT_EQ(MetricValue(*metrics_, "isobit_rank_memory_bytes", {{"of", "weights"}}),
            static_cast<double>(info.weight_bytes()));
  EXPECT_EQ(MetricValue(*metrics_, "isobit_weight_version"), 1);
  EXPECT_EQ(MetricValue(*metrics_, "isobit_weight_update_seconds"), 0);
  runner_.reset();
  service_.reset();
  EXPECT_TRUE(std::isnan(MetricValue(*metrics_, "isobit_weight_version"))) << "nothing to read";
  EXPECT_EQ(MetricValue(*metrics_, "isobit_tokens_generated_total"), 3 * 8);
}

TEST_P(RolloutServiceTest, SendsTheEnginesBits) {
  const SampleResult expected = EngineFixture::Generate(*MakeEngine(), MakeRequest("r"));
  StartServer();
  const Generated generated = Generate(MakeProto());
  const v1::TokenLogprobs& tokens = generated.tokens.at(0);
  EXPECT_TRUE(BitwiseEqual(std::vector<float>(tokens.logprobs().begin(), tokens.logprobs().end()),
                           expected.logprobs));
  EXPECT_EQ(std::vector<int32_t>(tokens.token_ids().begin(), tokens.token_ids().end()),
            expected.tokens);
}

TEST_P(RolloutServiceTest, UnsetParametersHaveTheirDocumentedDefaults) {
  StartServer();
  v1::GenerateRequest request;
  request.add_prompt_token_ids(3);
  request.mutable_sampling()->set_seed(5);
  const Generated plain = Generate(request);
  ISOBIT_ASSERT_OK(plain.status);
  EXPECT_LE(plain.complete.at(0).num_completion_tokens(), 16u);
  v1::SamplingParams& sampling = *request.mutable_sampling();
  sampling.set_temperature(1.0f);
  sampling.set_top_p(1.0f);
  sampling.set_top_k(-1);
  sampling.set_min_p(0.0f);
  sampling.set_n(1);
  sampling.set_max_tokens(16);
  sampling.set_repetition_penalty(1.0f);
  EXPECT_EQ(Generate(request).tokens.at(0).SerializeAsString(),
            plain.tokens.at(0).SerializeAsString());
  sampling.set_temperature(0.0f);
  EXPECT_NE(Generate(request).tokens.at(0).SerializeAsString(),
            plain.tokens.at(0).SerializeAsString())
      << "zero is not unset";
}

TEST_P(RolloutServiceTest, StreamsEverySample) {
  StartServer();
  v1::GenerateRequest request = MakeProto();
  request.mutable_sampling()->set_n(5);
  request.mutable_sampling()->add_stop_token_ids(7);
  request.set_logprob_mode(v1::LOGPROB_MODE_RAW);
  const Generated generated = Generate(request);
  ISOBIT_ASSERT_OK(generated.status);
  ASSERT_EQ(generated.complete.size(), 5u);
  for (const auto& [sample, complete] : generated.complete) {
    EXPECT_EQ(complete.num_completion_tokens(),
              static_cast<uint32_t>(generated.tokens.at(sample).token_ids_size()));
    EXPECT_EQ(complete.logprob_mode(), v1::LOGPROB_MODE_RAW);
    EXPECT_EQ(complete.has_stop_token_id(), complete.finish_reason() == v1::FINISH_REASON_STOP);
  }
}

TEST_P(RolloutServiceTest, SaysWhichPromptTokensWereFoundComputed) {
  StartServer();
  v1::GenerateRequest request = MakeProto();  // five tokens, of which a page holds four
  request.mutable_sampling()->set_n(3);
  for (const uint32_t found : {0u, 4u}) {
    const Generated generated = Generate(request);
    ISOBIT_ASSERT_OK(generated.status);
    EXPECT_EQ(generated.complete.at(0).num_cached_tokens(), found);
    EXPECT_EQ(generated.complete.at(2).num_cached_tokens(), 5u) << "by the first sample";
  }
  const v1::GetLoadResponse load = GetLoad();
  EXPECT_EQ(load.num_prompt_tokens(), 2u * 3 * 5);
  EXPECT_EQ(load.num_cached_prompt_tokens(), 4u * 5 + 4);
  EXPECT_GT(load.num_cached_pages(), 0u);
  EXPECT_LE(load.num_cached_pages(), load.num_free_pages());
  EXPECT_EQ(MetricValue(*metrics_, "isobit_prompt_tokens_total"), load.num_prompt_tokens());
  EXPECT_EQ(MetricValue(*metrics_, "isobit_prompt_tokens_cached_total"),
            load.num_cached_prompt_tokens());
  EXPECT_EQ(MetricValue(*metrics_, "isobit_kv_pages_cached"), load.num_cached_pages());
  v1::RolloutServerInfo info;
  ISOBIT_ASSERT_OK(Call(&Stub::GetServerInfo, *stub_, v1::GetServerInfoRequest(), info));
  EXPECT_TRUE(info.prefix_sharing());
}

// Field, value and bound of every bad input.
TEST_P(RolloutServiceTest, RefusesBadInputNamingFieldValueAndBound) {
  StartServer();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const struct {
    std::vector<std::string> message;
    std::function<void(v1::GenerateRequest&, v1::SamplingParams&)> spoil;
  } kCases[] = {
      {{"prompt_token_ids", "at least 1"}, [](auto& r, auto&) { r.clear_prompt_token_ids(); }},
      {{"prompt_token_ids[2]", "[0, 101)", "101"},
       [](auto& r, auto&) { r.set_prompt_token_ids(2, 101); }},
      {{"prompt_token_ids[4]", "4294967295"},
       [](auto& r, auto&) { r.set_prompt_token_ids(4, 4294967295u); }},
      {{"max_tokens", "at most 200", "context", "201"},
       [](auto&, auto& s) { s.set_max_tokens(196); }},
      {{"max_tokens", "4294967300"}, [](auto&, auto& s) { s.set_max_tokens(4294967295u); }},
      {{"max_tokens", "1 or more", "0"}, [](auto&, auto& s) { s.set_max_tokens(0); }},
      {{"sampling.n", "at most 128", "129"}, [](auto&, auto& s) { s.set_n(129); }},
      {{"sampling.n", "at most 128", "4294967295"}, [](auto&, auto& s) { s.set_n(0xffffffff); }},
      {{"sampling.n", "1 or more", "0"}, [](auto&, auto& s) { s.set_n(0); }},
      {{"sampling.logprobs", "at most 64", "65"}, [](auto&, auto& s) { s.set_logprobs(65); }},
      {{"sampling.temperature", "nan"}, [nan](auto&, auto& s) { s.set_temperature(nan); }},
      {{"sampling.temperature", "-1"}, [](auto&, auto& s) { s.set_temperature(-1.0f); }},
      {{"sampling.top_p", "(0, 1]", "0"}, [](auto&, auto& s) { s.set_top_p(0.0f); }},
      {{"sampling.top_p", "1.5"}, [](auto&, auto& s) { s.set_top_p(1.5f); }},
      {{"sampling.top_p", "nan"}, [nan](auto&, auto& s) { s.set_top_p(nan); }},
      {{"sampling.top_k", "-1 or more", "-2"}, [](auto&, auto& s) { s.set_top_k(-2); }},
      {{"sampling.min_p", "[0, 1]", "2"}, [](auto&, auto& s) { s.set_min_p(2.0f); }},
      {{"sampling.repetition_penalty", "0"},
       [](auto&, auto& s) { s.set_repetition_penalty(0.0f); }},
      {{"sampling.presence_penalty", "[-2, 2]", "3"},
       [](auto&, auto& s) { s.set_presence_penalty(3.0f); }},
      {{"sampling.frequency_penalty", "nan"},
       [nan](auto&, auto& s) { s.set_frequency_penalty(nan); }},
      {{"sampling.min_tokens", "at most 8", "9"}, [](auto&, auto& s) { s.set_min_tokens(9); }},
      {{"sampling.stop_token_ids", "[0, 101)", "200"},
       [](auto&, auto& s) { s.add_stop_token_ids(200); }},
      {{"sampling.logit_bias", "[0, 101)", "101"},
       [](auto&, auto& s) { (*s.mutable_logit_bias())[101] = 1.0f; }},
      {{"sampling.logit_bias", "nan"},
       [nan](auto&, auto& s) { (*s.mutable_logit_bias())[1] = nan; }},
      {{"timeout_ms", "[1, ", "got 0"}, [](auto& r, auto&) { r.set_timeout_ms(0); }},
      {{"timeout_ms"}, [](auto& r, auto&) { r.set_timeout_ms(UINT64_MAX); }},
      {{"logprob_mode", "7"},
       [](auto& r, auto&) { r.set_logprob_mode(static_cast<v1::LogprobMode>(7)); }},
      {{"request_id", "256", "257"},
       [](auto& r, auto&) { r.set_request_id(std::string(257, 'x')); }},
  };
  for (const auto& test : kCases) {
    v1::GenerateRequest request = MakeProto();
    test.spoil(request, *request.mutable_sampling());
    const absl::Status status = Generate(request).status;
    for (const std::string& part : test.message) {
      EXPECT_THAT(status, StatusIs(StatusCode::kInvalidArgument, HasSubstr(part)));
    }
  }
  ISOBIT_EXPECT_OK(Generate(MakeProto()).status) << "and lives on";
}

TEST_P(RolloutServiceTest, RefusesAtOnceWhatCanNeverFit) {
  EngineOptions options = DefaultOptions();
  options.runner.num_pages = 10;
  options.scheduler.max_batch_tokens = 60;
  StartServer(options);
  v1::GenerateRequest request = MakeProto();
  request.mutable_sampling()->set_max_tokens(36);
  EXPECT_THAT(Generate(request).status, StatusIs(StatusCode::kInvalidArgument,
                                                 AllOf(HasSubstr("KV pages"), HasSubstr("40"))));
  request.mutable_sampling()->set_max_tokens(56);
  EXPECT_THAT(Generate(request).status,
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("max_batch_tokens")));
  request.mutable_sampling()->set_max_tokens(35);
  ISOBIT_EXPECT_OK(Generate(request).status);
}

TEST_P(RolloutServiceTest, IsUnavailableBeforeWeightsAreLoaded) {
  StartServer(DefaultOptions(), /*load=*/false);
  EXPECT_THAT(Generate(MakeProto()).status, StatusIs(StatusCode::kUnavailable));
  v1::RolloutServerInfo info;
  ISOBIT_ASSERT_OK(Call(&Stub::GetServerInfo, *stub_, v1::GetServerInfoRequest(), info));
  EXPECT_FALSE(info.server().has_weight_version());
}

TEST_P(RolloutServiceTest, RefusesAnIdInFlightAndGivesARetryHintWhenFull) {
  EngineOptions options = DefaultOptions();
  options.scheduler.max_running = 1;
  options.max_waiting_requests = 1;
  StartServer(options);
  v1::PauseGenerationResponse paused;
  ISOBIT_ASSERT_OK(Call(&Stub::PauseGeneration, *stub_, v1::PauseGenerationRequest(), paused));
  grpc::ClientContext context;
  const auto waiting = stub_->Generate(&context, MakeProto("a"));
  AwaitLoad([](const auto& load) { return load.num_waiting_requests() == 1; });
  EXPECT_EQ(GetLoad().num_queued_tokens(), 5u);
  EXPECT_TRUE(GetLoad().paused());
  EXPECT_THAT(Generate(MakeProto("a")).status,
              StatusIs(StatusCode::kAlreadyExists, HasSubstr("\"a\"")));
  const absl::Status full = Generate(MakeProto("b")).status;
  EXPECT_THAT(full, StatusIs(StatusCode::kResourceExhausted, HasSubstr("at most 1")));
  EXPECT_EQ(RetryAfter(full), std::chrono::milliseconds(1000));

  v1::ContinueGenerationResponse continued;
  ISOBIT_ASSERT_OK(
      Call(&Stub::ContinueGeneration, *stub_, v1::ContinueGenerationRequest(), continued));
  EXPECT_EQ(continued.num_resumed(), 1u);
  Generated generated;
  ReadAll(*waiting, context, generated);
  ISOBIT_EXPECT_OK(generated.status);
}

TEST_P(RolloutServiceTest, ClientThatIsGoneFreesItsPages) {
  StartServer();
  grpc::ClientContext context;
  const auto reader = stub_->Generate(&context, MakeLongProto("r"));
  ReadFirstToken(*reader);
  context.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  AwaitLoad([](const auto& load) {
    return load.num_used_pages() == 0 && load.num_running_requests() == 0;
  });
}

TEST_P(RolloutServiceTest, PassedDeadlineFreesItsPagesEvenWhilePaused) {
  StartServer();
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(300));
  const auto reader = stub_->Generate(&context, MakeLongProto("r"));
  ReadFirstToken(*reader);
  v1::PauseGenerationRequest keep;
  keep.set_mode(v1::PAUSE_MODE_KEEP);
  v1::PauseGenerationResponse paused;
  ISOBIT_ASSERT_OK(Call(&Stub::PauseGeneration, *stub_, keep, paused));
  v1::GenerateResponse response;
  while (reader->Read(&response)) {
  }
  const grpc::StatusCode code = reader->Finish().error_code();
  EXPECT_TRUE(code == grpc::StatusCode::DEADLINE_EXCEEDED ||
              (code == grpc::StatusCode::OK && paused.num_kept() == 0))
      << code;
  AwaitLoad([](const auto& load) { return load.num_used_pages() == 0; });
}

TEST_P(RolloutServiceTest, TimeoutReturnsWhatThereIs) {
  StartServer();
  v1::PauseGenerationResponse paused;
  ISOBIT_ASSERT_OK(Call(&Stub::PauseGeneration, *stub_, v1::PauseGenerationRequest(), paused));
  v1::GenerateRequest request = MakeProto();
  request.set_timeout_ms(50);
  const Generated generated = Generate(request);
  ISOBIT_ASSERT_OK(generated.status);
  EXPECT_EQ(generated.complete.at(0).finish_reason(), v1::FINISH_REASON_ABORT);
  EXPECT_THAT(generated.complete.at(0).abort_reason(), HasSubstr("timeout_ms"));
  EXPECT_EQ(generated.complete.at(0).num_completion_tokens(), 0u);
}

TEST_P(RolloutServiceTest, AbortReturnsWhatThereIs) {
  StartServer();
  grpc::ClientContext context;
  v1::GenerateRequest request = MakeLongProto("r");
  request.mutable_sampling()->set_n(4);
  const auto reader = stub_->Generate(&context, request);
  Generated generated;
  v1::GenerateResponse first;
  ASSERT_TRUE(reader->Read(&first));
  generated.tokens[first.chunk().index()].MergeFrom(first.chunk().tokens());
  v1::AbortRequest abort;
  abort.add_request_ids("r");
  abort.add_request_ids("unknown");
  v1::AbortResponse aborted;
  ISOBIT_ASSERT_OK(Call(&Stub::Abort, *stub_, abort, aborted));
  ReadAll(*reader, context, generated);
  ISOBIT_EXPECT_OK(generated.status);
  ASSERT_EQ(generated.complete.size(), 4u);
  if (aborted.request_ids_size() == 1) {
    EXPECT_THAT(aborted.request_ids(), ElementsAre("r"));
    for (const auto& [sample, complete] : generated.complete) {
      EXPECT_EQ(complete.finish_reason(), v1::FINISH_REASON_ABORT);
      EXPECT_EQ(complete.num_completion_tokens(),
                static_cast<uint32_t>(generated.tokens[sample].token_ids_size()));
    }
  }
  abort.set_all(true);
  EXPECT_THAT(Call(&Stub::Abort, *stub_, abort, aborted),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("request_ids")));
  abort.clear_request_ids();
  ISOBIT_EXPECT_OK(Call(&Stub::Abort, *stub_, abort, aborted));
}

TEST_P(RolloutServiceTest, UpdatesWeightsAndStampsEveryToken) {
  StartServer();
  v1::UpdateWeightsRequest update;
  update.set_model_path("v2");
  update.set_in_flight_mode(v1::IN_FLIGHT_MODE_RECOMPUTE_KV);
  v1::UpdateWeightsResponse updated;
  grpc::ClientContext context;
  const auto reader = stub_->Generate(&context, MakeLongProto("r"));
  ReadFirstToken(*reader);
  ISOBIT_ASSERT_OK(Call(&Stub::UpdateWeights, *stub_, update, updated));
  EXPECT_EQ(MetricValue(*metrics_, "isobit_weight_update_seconds"), 1);
  EXPECT_EQ(MetricValue(*metrics_, "isobit_weight_version"), updated.current().id());
  EXPECT_EQ(updated.previous().id(), 1u);
  EXPECT_EQ(updated.current().id(), 2u);
  EXPECT_NE(updated.previous().digest(), updated.current().digest());
  EXPECT_GT(updated.stage_micros(), 0u);
  Generated generated;
  ReadAll(*reader, context, generated);
  ISOBIT_ASSERT_OK(generated.status);
  const auto& versions = generated.tokens.at(0).weight_versions();
  EXPECT_TRUE(std::is_sorted(versions.begin(), versions.end()));
  EXPECT_EQ(generated.complete.at(0).weight_version().id(), *versions.rbegin());

  v1::RolloutServerInfo info;
  ISOBIT_ASSERT_OK(Call(&Stub::GetServerInfo, *stub_, v1::GetServerInfoRequest(), info));
  EXPECT_EQ(info.server().weight_version().digest(), updated.current().digest());

  update.set_model_path("../v1");
  EXPECT_THAT(Call(&Stub::UpdateWeights, *stub_, update, updated),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("..")));
  update.set_model_path("v1");
  update.set_weight_version(2);
  EXPECT_THAT(Call(&Stub::UpdateWeights, *stub_, update, updated),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("weight_version")));
  update.set_in_flight_mode(static_cast<v1::InFlightMode>(9));
  EXPECT_THAT(Call(&Stub::UpdateWeights, *stub_, update, updated),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("in_flight_mode")));
  v1::PauseGenerationRequest pause;
  pause.set_mode(static_cast<v1::PauseMode>(9));
  v1::PauseGenerationResponse paused;
  EXPECT_THAT(Call(&Stub::PauseGeneration, *stub_, pause, paused),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("mode")));
}

TEST_P(RolloutServiceTest, NonFiniteLogitsAreAnInternalError) {
  testing_support::TinyWeights weights = testing_support::RandomWeights(config_, 1);
  weights.tensors["model.embed_tokens.weight"][15 * 40] = 0x7f80;  // token 15 is infinite
  testing_support::WriteModel(config_, weights, root_.File("v1"));
  EngineOptions options = DefaultOptions();
  options.load_policy.allow_nonfinite = true;
  StartServer(options);
  const Generated generated = Generate(MakeProto());
  EXPECT_THAT(generated.status, StatusIs(StatusCode::kInternal, HasSubstr("position 5")));
  EXPECT_TRUE(generated.tokens.empty());
}

TEST_P(RolloutServiceTest, DescribesItself) {
  StartServer();
  v1::RolloutServerInfo info;
  ISOBIT_ASSERT_OK(Call(&Stub::GetServerInfo, *stub_, v1::GetServerInfoRequest(), info));
  EXPECT_EQ(info.server().version(), ISOBIT_VERSION);
  EXPECT_EQ(info.server().numerics_mode(), v1::NUMERICS_MODE_TREE);
  EXPECT_EQ(info.server().fingerprint().hex().size(), 64u);
  EXPECT_EQ(info.server().fingerprint().contract_version(), 2u);
  EXPECT_EQ(info.server().weight_version().id(), 1u);
  EXPECT_THAT(info.server().instruction_set(), HasSubstr("cpu"));
  EXPECT_EQ(info.server().model().architecture(), "Qwen3ForCausalLM");
  EXPECT_EQ(info.server().model().vocab_size(), 101u);
  EXPECT_EQ(info.server().model().context_length(), 200u);
  EXPECT_GT(info.server().model().num_parameters(), 101u * 40 * 2);
  EXPECT_EQ(info.tensor_parallel_size(), 4u);
  EXPECT_EQ(info.page_size(), 4u);
  EXPECT_EQ(info.num_pages(), 64u);
  EXPECT_EQ(info.max_n(), 128u);
  // Keys and values of all layers, in bf16, of the KV heads of the rank with the most.
  const auto tokens = uint64_t{info.num_pages()} * info.page_size();
  const auto head_bytes = uint64_t{4} * static_cast<uint64_t>(config_.num_layers) *
                          static_cast<uint64_t>(config_.head_dim);
  const auto heads = static_cast<uint64_t>((config_.num_kv_heads + 3) / 4);
  EXPECT_EQ(info.kv_cache_bytes(), tokens * head_bytes * heads);
  EXPECT_GT(info.weight_bytes(), 0u);
  EXPECT_EQ(GetLoad().num_free_pages(), 64u);
}

std::unique_ptr<Stub> NarrowStub(int port) {
  return v1::RolloutService::NewStub(NarrowChannel(port));
}

// Sixteen samples with many alternatives: more than half a megabyte.
v1::GenerateRequest Bulky(v1::GenerateRequest request) {
  request.mutable_sampling()->set_n(16);
  request.mutable_sampling()->set_logprobs(64);
  request.mutable_sampling()->set_max_tokens(100);
  return request;
}

TEST_P(RolloutServiceTest, SlowReaderGetsEverythingInFewMessages) {
  EngineOptions options = DefaultOptions();
  options.runner.num_pages = 16 * 32;
  StartServer(options);
  const Generated prompt_reader = Generate(Bulky(MakeProto("prompt")));
  grpc::ClientContext context;
  const auto narrow = NarrowStub(runner_->port());
  const auto reader = narrow->Generate(&context, Bulky(MakeProto("slow")));
  reader->WaitForInitialMetadata();
  ISOBIT_EXPECT_OK(Generate(MakeProto("other")).status) << "others are unaffected";
  AwaitLoad([](const auto& load) { return load.num_running_requests() == 0; });
  Generated slow;
  ReadAll(*reader, context, slow);
  ISOBIT_ASSERT_OK(slow.status);
  ASSERT_EQ(slow.tokens.size(), 16u);
  for (uint32_t i = 0; i < 16; ++i) {
    EXPECT_EQ(slow.tokens.at(i).SerializeAsString(),
              prompt_reader.tokens.at(i).SerializeAsString());
  }
  EXPECT_LT(slow.num_messages, 16u * 100 / 2);
}

TEST_P(RolloutServiceTest, ReaderThatNeverReadsLosesItsCallAlone) {
  EngineOptions options = DefaultOptions();
  options.runner.num_pages = 16 * 32;
  StartServer(options, /*load=*/true, {.max_backlog_bytes = 64 << 10});
  grpc::ClientContext context;
  const auto narrow = NarrowStub(runner_->port());
  const auto reader = narrow->Generate(&context, Bulky(MakeProto("slow")));
  reader->WaitForInitialMetadata();
  AwaitLoad([](const auto& load) { return load.num_used_pages() == 0; });
  ISOBIT_EXPECT_OK(Generate(MakeProto("other")).status);
  Generated slow;
  ReadAll(*reader, context, slow);
  EXPECT_THAT(slow.status, StatusIs(StatusCode::kResourceExhausted, HasSubstr("too slow")));
}

TEST_P(RolloutServiceTest, FewerMessagesHaveTheSameTokens) {
  EngineOptions options = DefaultOptions();
  options.runner.num_pages = 16 * 32;
  StartServer(options);
  v1::GenerateRequest request = Bulky(MakeProto());
  const Generated streamed = Generate(request);
  const auto generate = [&] {
    const Generated fewer = Generate(request);
    ISOBIT_EXPECT_OK(fewer.status);
    EXPECT_EQ(fewer.tokens.size(), 16u);
    for (const auto& [sample, tokens] : fewer.tokens) {
      EXPECT_EQ(tokens.SerializeAsString(), streamed.tokens.at(sample).SerializeAsString());
    }
    return fewer.num_messages;
  };
  request.set_chunk_interval_ms(3'600'000);
  EXPECT_LE(generate(), 16u * 3) << "the first token, the rest, and an end for each sample";
  request.set_final_only(true);
  EXPECT_EQ(generate(), 16u * 2) << "a chunk and an end for each sample";
}

TEST_P(RolloutServiceTest, FinalOnlyMayHoldBackMoreThanASlowReader) {
  EngineOptions options = DefaultOptions();
  options.runner.num_pages = 16 * 32;
  StartServer(options, /*load=*/true, {.max_backlog_bytes = 64 << 10});
  v1::GenerateRequest request = Bulky(MakeProto());
  request.set_final_only(true);
  ISOBIT_EXPECT_OK(Generate(request).status);
}

// Requests that several threads send and cancel, with fixed seeds. In the end no request is left,
// and every stream that was read to its end has the bits of an undisturbed run.
TEST_P(RolloutServiceTest, SurvivesCancelsAndAbortsUnderLoad) {
  EngineOptions options = DefaultOptions();
  options.runner.num_pages = 40;  // some are preempted
  StartServer(options);
  const std::string expected = Generate(MakeProto()).tokens.at(0).SerializeAsString();
  std::vector<std::thread> clients;
  for (int c = 0; c < 4; ++c) {
    clients.emplace_back([&, c] {
      for (int i = 0; i < 25; ++i) {
        grpc::ClientContext context;
        v1::GenerateRequest request = MakeProto(absl::StrCat(c, "-", i));
        const auto reader = stub_->Generate(&context, request);
        if (i % 3 == 1) context.TryCancel();
        Generated generated;
        if (i % 3 == 2) {
          v1::AbortRequest abort;
          abort.add_request_ids(request.request_id());
          v1::AbortResponse aborted;
          ISOBIT_EXPECT_OK(Call(&Stub::Abort, *stub_, abort, aborted));
        }
        ReadAll(*reader, context, generated);
        if (i % 3 != 0) continue;
        ISOBIT_EXPECT_OK(generated.status);
        EXPECT_EQ(generated.tokens.at(0).SerializeAsString(), expected);
      }
    });
  }
  for (std::thread& client : clients) client.join();
  AwaitLoad([](const auto& load) {
    return load.num_used_pages() == 0 && load.num_running_requests() == 0 &&
           load.num_waiting_requests() == 0;
  });
}

}  // namespace
}  // namespace isobit
