// The scorer over a real loopback connection: its responses, and its errors for invalid input.
#include "trainer_bridge/scorer/scorer_service.h"

#include <grpcpp/client_context.h>

#include <cmath>
#include <limits>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/rpc/channel.h"
#include "common/rpc/server_runner.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/isobit/status_convert.h"
#include "tests/support/bitwise.h"
#include "tests/support/metric_value.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_model.h"
#include "tests/support/weight_messages.h"
#include "tests/trainer_bridge/scorer/hooked_ops.h"
#include "tests/trainer_bridge/scorer/pass_gate.h"
#include "tests/trainer_bridge/scorer/scoring_fixture.h"

namespace isobit {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing_support::BitwiseEqual;
using testing_support::MetricValue;
using testing_support::StatusIs;

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;

// A context whose call fails rather than hangs.
struct Context : grpc::ClientContext {
  Context() { set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1)); }
};

std::vector<float> Floats(const google::protobuf::RepeatedField<float>& field) {
  return {field.begin(), field.end()};
}

class ScorerServiceTest : public testing::Test {
 protected:
  ScorerServiceTest() : config_(testing_support::TinyConfig(Architecture::kQwen2)) {
    testing_support::WriteTinyModel(config_, 1, dir_.File("first"));
    testing_support::WriteTinyModel(config_, 2, dir_.File("second"));
    options_.model_root = dir_.path();
    options_.max_batch_tokens = 64;
    options_.backend.make_ops = [this](int) {
      return std::make_unique<HookedOps>([this] { return gate_.Pass(); });
    };
  }
  ~ScorerServiceTest() override {
    gate_.Open();
    runner_.reset();
  }

  void Listen(const ScorerService::Options& options = {.max_sequences = 20}) {
    service_ = std::make_unique<ScorerService>(options, CallGate::Create(), metrics_);
    runner_ = std::make_unique<ServerRunner>(ServerOptions{});
    runner_->Register(service_.get(), v1::ScorerService::service_full_name());
    ISOBIT_ASSERT_OK(runner_->Start());
    channel_ = MakeChannel("127.0.0.1:" + std::to_string(runner_->port()));
    stub_ = v1::ScorerService::NewStub(channel_);
  }
  void LoadModel() {
    ISOBIT_ASSERT_OK_AND_ASSIGN(std::unique_ptr<Scorer> scorer, Scorer::Load(options_, "first"));
    service_->SetScorer(std::move(scorer));
  }
  void Start() {
    Listen();
    LoadModel();
  }

  static v1::ScoreRequest RequestOf(const std::vector<ScoreInput>& inputs) {
    v1::ScoreRequest request;
    for (const ScoreInput& input : inputs) {
      v1::ScoreSequence& sequence = *request.add_sequences();
      sequence.set_sequence_id(absl::StrCat("s", request.sequences_size() - 1));
      sequence.mutable_prompt_token_ids()->Add(input.prompt.begin(), input.prompt.end());
      sequence.mutable_completion_token_ids()->Add(input.completion.begin(),
                                                   input.completion.end());
    }
    return request;
  }

  // The responses by index, and how the call ended.
  struct Answer {
    std::map<uint32_t, v1::ScoreResponse> responses;
    absl::Status status;
  };
  Answer Call(const v1::ScoreRequest& request) {
    Context context;
    Answer answer;
    const auto reader = stub_->Score(&context, request);
    v1::ScoreResponse response;
    while (reader->Read(&response)) answer.responses[response.index()] = response;
    answer.status = FromGrpcStatus(reader->Finish(), context);
    return answer;
  }
  absl::Status Update(const v1::UpdateWeightsRequest& request,
                      v1::UpdateWeightsResponse* response = nullptr) {
    Context context;
    v1::UpdateWeightsResponse ignored;
    return FromGrpcStatus(
        stub_->UpdateWeights(&context, request, response != nullptr ? response : &ignored));
  }
  v1::ScorerServerInfo Info() {
    Context context;
    v1::ScorerServerInfo info;
    EXPECT_TRUE(stub_->GetServerInfo(&context, {}, &info).ok());
    return info;
  }

  const testing_support::TempDir dir_;
  const ModelConfig config_;
  const ScoreInput probe_ = {.prompt = {4, 5, 6}, .completion = {7, 8}};
  PassGate gate_;
  ScorerOptions options_;
  const std::shared_ptr<Metrics> metrics_ = std::make_shared<Metrics>();
  std::unique_ptr<ScorerService> service_;
  std::unique_ptr<ServerRunner> runner_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::ScorerService::Stub> stub_;
};

TEST_F(ScorerServiceTest, StreamsScoresWithAllThatWasAskedFor) {
  Start();
  const std::vector<ScoreInput> inputs = RandomInputs(config_, 1, 8, 30);
  v1::ScoreRequest request = RequestOf(inputs);
  request.set_prompt_logprobs(true);
  request.set_entropy(true);
  v1::SamplingParams& sampling = *request.mutable_sampling();
  sampling.set_temperature(0.7f);
  sampling.set_top_k(60);
  sampling.set_repetition_penalty(1.2f);
  sampling.set_logprobs(3);
  sampling.set_n(0);           // scoring ignores it
  sampling.set_max_tokens(1);  // and this
  (*sampling.mutable_logit_bias())[5] = 2.5f;
  ScoreOptions options;
  options.sampling.temperature = 0.7f;
  options.sampling.top_k = 60;
  options.sampling.repetition_penalty = 1.2f;
  options.sampling.logit_bias = {{5, 2.5f}};
  options.sampling.logprobs = 3;
  options.prompt_logprobs = true;
  options.entropy = true;

  const Answer answer = Call(request);
  ISOBIT_ASSERT_OK(answer.status);
  ASSERT_EQ(answer.responses.size(), inputs.size());
  const v1::ScorerServerInfo info = Info();
  for (const auto& [index, response] : answer.responses) {
    const ScoreInput& input = inputs[index];
    const SequenceScore expected = ScoreByDefinition(dir_.File("first"), input, options);
    EXPECT_EQ(response.sequence_id(), absl::StrCat("s", index));
    EXPECT_TRUE(
        BitwiseEqual(Floats(response.completion().logprobs()), expected.completion.logprobs));
    EXPECT_TRUE(BitwiseEqual(Floats(response.prompt().logprobs()), expected.prompt.logprobs));
    EXPECT_TRUE(BitwiseEqual(Floats(response.entropies()), expected.completion.entropies));
    EXPECT_THAT(response.completion().token_ids(), testing::ElementsAreArray(input.completion));
    EXPECT_EQ(response.prompt().token_ids_size(), static_cast<int>(input.prompt.size()) - 1);
    EXPECT_EQ(response.completion().top_size(), static_cast<int>(input.completion.size()));
    for (int t = 0; t < response.completion().top_size(); ++t) {
      const TokenLogProb& best = expected.completion.top[3 * static_cast<size_t>(t)];
      EXPECT_EQ(response.completion().top(t).token_ids(0), static_cast<uint32_t>(best.id));
      EXPECT_TRUE(BitwiseEqual(response.completion().top(t).logprobs(0), best.logprob));
      EXPECT_EQ(response.completion().weight_versions(t), 1u);
    }
    EXPECT_EQ(response.logprob_mode(), v1::LOGPROB_MODE_PROCESSED);
    EXPECT_EQ(response.weight_version().id(), 1u);
    EXPECT_EQ(response.weight_version().digest(), info.server().weight_version().digest());
    EXPECT_EQ(response.fingerprint().hex(), info.server().fingerprint().hex());
  }
}

TEST_F(ScorerServiceTest, MetricsAgreeWithWhatCallsAnswer) {
  Listen();
  EXPECT_TRUE(std::isnan(MetricValue(*metrics_, "isobit_shard_bytes"))) << "not loaded yet";
  LoadModel();
  v1::ScoreRequest request = RequestOf({probe_, probe_});
  ISOBIT_ASSERT_OK(Call(request).status);
  EXPECT_EQ(MetricValue(*metrics_, "isobit_tokens_scored_total"), 2 * 2);
  request.set_prompt_logprobs(true);
  ISOBIT_ASSERT_OK(Call(request).status);
  EXPECT_EQ(MetricValue(*metrics_, "isobit_tokens_scored_total"), 2 * 2 + 2 * (2 + 2));
  // Twice the same 32 tokens, computed once. A pass counts when the next one begins at the latest.
  const ScoreInput alike = {.prompt = std::vector<int32_t>(31, 4), .completion = {6}};
  request = RequestOf({alike, alike});
  ISOBIT_ASSERT_OK(Call(request).status);
  ISOBIT_ASSERT_OK(Call(request).status);
  EXPECT_GE(MetricValue(*metrics_, "isobit_tokens_computed_total"), 2 * 2 * 5 + 32);
  EXPECT_GE(MetricValue(*metrics_, "isobit_prompt_tokens_shared_total"), 32);
  EXPECT_EQ(MetricValue(*metrics_, "isobit_shard_bytes"), Info().shard_bytes());
  EXPECT_EQ(MetricValue(*metrics_, "isobit_gathered_layers_max"), Info().peak_full_layers());
  EXPECT_EQ(MetricValue(*metrics_, "isobit_weight_version"), 1);
  EXPECT_EQ(MetricValue(*metrics_, "isobit_weight_update_seconds"), 0);
  v1::UpdateWeightsRequest update;
  update.set_model_path("second");
  ISOBIT_ASSERT_OK(Update(update));
  EXPECT_EQ(MetricValue(*metrics_, "isobit_weight_version"), 2);
  EXPECT_EQ(MetricValue(*metrics_, "isobit_weight_update_seconds"), 1);
}

TEST_F(ScorerServiceTest, SaysWhatItIs) {
  Start();
  ISOBIT_ASSERT_OK(Call(RequestOf({probe_})).status);
  const v1::ScorerServerInfo info = Info();
  EXPECT_EQ(info.server().model().architecture(), "Qwen2ForCausalLM");
  EXPECT_EQ(info.server().model().vocab_size(), static_cast<uint32_t>(config_.vocab_size));
  EXPECT_EQ(info.server().model().context_length(), 512u);
  EXPECT_GT(info.server().model().num_parameters(), 10000u);
  EXPECT_EQ(info.server().numerics_mode(), v1::NUMERICS_MODE_TREE);
  EXPECT_EQ(info.server().fingerprint().hex().size(), 64u);
  EXPECT_EQ(info.server().weight_version().digest().size(), 64u);
  EXPECT_EQ(info.num_shards(), 2u);
  EXPECT_GT(info.shard_bytes(), 0u);
  EXPECT_GT(info.layer_bytes(), 0u);
  EXPECT_GE(info.peak_full_layers(), 1u);
  EXPECT_LE(info.peak_full_layers(), 2u);
  EXPECT_EQ(info.max_sequences(), 20u);
  EXPECT_EQ(info.max_batch_tokens(), 64u);
  EXPECT_EQ(info.server().max_logprobs(), 64u);
}

TEST_F(ScorerServiceTest, BadInputIsRefusedByNameValueAndBound) {
  Start();
  const auto expect_refused = [&](const auto& change, absl::StatusCode code,
                                  const std::vector<std::string>& texts) {
    v1::ScoreRequest request = RequestOf({probe_, probe_});
    change(request);
    const Answer answer = Call(request);
    EXPECT_EQ(answer.status.code(), code) << answer.status.ToString();
    EXPECT_TRUE(answer.responses.empty());
    for (const std::string& text : texts) {
      EXPECT_THAT(std::string(answer.status.message()), HasSubstr(text));
    }
  };
  using Request = v1::ScoreRequest;
  expect_refused([](Request& r) { r.clear_sequences(); }, kInvalid, {"sequences", "1 to 20", "0"});
  expect_refused([&](Request& r) { r = RequestOf(std::vector<ScoreInput>(21, probe_)); }, kInvalid,
                 {"sequences", "20", "21"});
  expect_refused([](Request& r) { r.mutable_sequences(1)->clear_prompt_token_ids(); }, kInvalid,
                 {"sequences[1].prompt_token_ids", "at least one"});
  expect_refused([](Request& r) { r.mutable_sequences(1)->clear_completion_token_ids(); }, kInvalid,
                 {"sequences[1].completion_token_ids", "prompt_logprobs"});
  expect_refused([](Request& r) { r.mutable_sequences(1)->set_prompt_token_ids(2, 101); }, kInvalid,
                 {"sequences[1].prompt_token_ids[2]", "[0, 101)", "got 101"});
  expect_refused(
      [](Request& r) { r.mutable_sequences(0)->set_completion_token_ids(0, 4294967295u); },
      kInvalid, {"sequences[0].completion_token_ids[0]", "4294967295"});
  expect_refused(
      [](Request& r) {
        for (int i = 0; i < 508; ++i) r.mutable_sequences(0)->add_completion_token_ids(3);
      },
      kInvalid, {"sequences[0]", "512", "513"});
  expect_refused([](Request& r) { r.set_logprob_mode(static_cast<v1::LogprobMode>(9)); }, kInvalid,
                 {"logprob_mode", "9"});
  expect_refused([](Request& r) { r.set_weight_version(3); }, absl::StatusCode::kFailedPrecondition,
                 {"weight_version", "3", "1"});

  const auto expect_bad_sampling = [&](const auto& change, const std::string& field) {
    expect_refused([&](Request& r) { change(*r.mutable_sampling()); }, kInvalid, {field});
  };
  using Sampling = v1::SamplingParams;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  expect_bad_sampling([&](Sampling& s) { s.set_temperature(nan); }, "temperature");
  expect_bad_sampling([&](Sampling& s) { s.set_temperature(-1); }, "temperature");
  expect_bad_sampling([&](Sampling& s) { s.set_top_p(nan); }, "top_p");
  expect_bad_sampling([&](Sampling& s) { s.set_top_p(0); }, "top_p");
  expect_bad_sampling([&](Sampling& s) { s.set_top_k(-2); }, "top_k");
  expect_bad_sampling([&](Sampling& s) { s.set_min_p(1.5f); }, "min_p");
  expect_bad_sampling([&](Sampling& s) { s.set_repetition_penalty(0); }, "repetition_penalty");
  expect_bad_sampling([&](Sampling& s) { s.set_presence_penalty(nan); }, "presence_penalty");
  expect_bad_sampling([&](Sampling& s) { s.set_frequency_penalty(INFINITY); }, "frequency_penalty");
  expect_bad_sampling([&](Sampling& s) { s.set_logprobs(65); }, "logprobs");
  expect_bad_sampling([&](Sampling& s) { s.add_stop_token_ids(101); }, "stop_token_ids");
  expect_bad_sampling([&](Sampling& s) { (*s.mutable_logit_bias())[101] = 1; }, "logit_bias");
  expect_bad_sampling([&](Sampling& s) { (*s.mutable_logit_bias())[1] = nan; }, "logit_bias");

  expect_refused(
      [](Request& r) { r.mutable_sequences(0)->set_sequence_id(std::string(17 << 20, 'x')); },
      absl::StatusCode::kResourceExhausted, {"16777216"});
  ISOBIT_EXPECT_OK(Call(RequestOf({probe_})).status);
}

TEST_F(ScorerServiceTest, CallsThatNeedMoreMemoryThanTheyMayAreRefusedWithARetryHint) {
  Listen({.memory = {.total = 200 << 10, .client_share = 0.5}});
  LoadModel();
  gate_.Close();
  Context context;
  const auto reader = stub_->Score(&context, RequestOf(std::vector<ScoreInput>(40, probe_)));
  ASSERT_TRUE(gate_.WaitForArrivals(1));
  const absl::Status refused = Call(RequestOf({probe_})).status;
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kResourceExhausted,
                                HasSubstr("at most 102400 of one client")));
  EXPECT_TRUE(RetryAfter(refused).has_value());
  gate_.Open();
  v1::ScoreResponse response;
  while (reader->Read(&response)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
  // The server ends the previous call a moment after its client has the status.
  absl::Status next = Call(RequestOf({probe_})).status;
  for (int i = 0; i < 3000 && !next.ok(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    next = Call(RequestOf({probe_})).status;
  }
  ISOBIT_EXPECT_OK(next);
}

TEST_F(ScorerServiceTest, AFullQueueIsRefusedWithARetryHint) {
  options_.max_queued_sequences = 20;
  Start();
  gate_.Close();
  Context context;
  const auto reader = stub_->Score(&context, RequestOf(std::vector<ScoreInput>(20, probe_)));
  ASSERT_TRUE(gate_.WaitForArrivals(1));
  const absl::Status refused = Call(RequestOf({probe_})).status;
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kResourceExhausted,
                                AllOf(HasSubstr("21"), HasSubstr("20"))));
  EXPECT_TRUE(RetryAfter(refused).has_value());
  gate_.Open();
  v1::ScoreResponse response;
  while (reader->Read(&response)) continue;
  EXPECT_TRUE(reader->Finish().ok());
  ISOBIT_EXPECT_OK(Call(RequestOf({probe_})).status);
}

TEST_F(ScorerServiceTest, ACancelledCallStopsItsWork) {
  options_.num_shards = 1;
  options_.max_batch_tokens = 1;
  options_.max_queued_sequences = 20;
  Start();
  gate_.Close();
  Context context;
  const auto reader = stub_->Score(&context, RequestOf(std::vector<ScoreInput>(20, probe_)));
  ASSERT_TRUE(gate_.WaitForArrivals(1));
  context.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);

  // The queue stays full until the server notices the cancellation. Then it takes the next call,
  // which cannot end while the gate is closed.
  absl::Status status;
  for (int i = 0; i < 1000 && !absl::IsDeadlineExceeded(status); ++i) {
    grpc::ClientContext brief;
    brief.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(100));
    const auto waiting = stub_->Score(&brief, RequestOf({probe_}));
    status = FromGrpcStatus(waiting->Finish());
  }
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kDeadlineExceeded));
  gate_.Open();
  EXPECT_EQ(Call(RequestOf({probe_})).responses.size(), 1u);
  EXPECT_LE(gate_.arrivals(), 3) << "passes were run for nobody";
}

TEST_F(ScorerServiceTest, ASlowReaderGetsEverythingAndHoldsUpNobody) {
  options_.max_batch_tokens = 5;  // so that a batch takes one sequence for each rank
  Listen({.max_sequences = 20, .max_queued_bytes = 1});
  LoadModel();
  v1::ScoreRequest request = RequestOf(std::vector<ScoreInput>(20, probe_));
  // Large enough to fill the connection's own buffers.
  for (v1::ScoreSequence& sequence : *request.mutable_sequences()) {
    sequence.set_sequence_id(std::string(700000, 'x'));
  }
  Context context;
  const auto slow = stub_->Score(&context, request);
  ASSERT_TRUE(gate_.WaitForArrivals(1));
  EXPECT_EQ(Call(RequestOf({probe_, probe_})).responses.size(), 2u);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_LT(gate_.arrivals(), 20) << "scored ahead of the reader";
  v1::ScoreResponse response;
  int count = 0;
  while (slow->Read(&response)) ++count;
  EXPECT_TRUE(slow->Finish().ok());
  EXPECT_EQ(count, 20);
}

TEST_F(ScorerServiceTest, UpdatesWeightsAndReportsThem) {
  Start();
  v1::UpdateWeightsRequest request;
  request.set_model_path("second");
  v1::UpdateWeightsResponse response;
  ISOBIT_ASSERT_OK(Update(request, &response));
  EXPECT_EQ(response.previous().id(), 1u);
  EXPECT_EQ(response.current().id(), 2u);
  EXPECT_EQ(Info().server().weight_version().digest(), response.current().digest());
  const Answer answer = Call(RequestOf({probe_}));
  ISOBIT_ASSERT_OK(answer.status);
  EXPECT_EQ(answer.responses.at(0).weight_version().id(), 2u);
  EXPECT_TRUE(BitwiseEqual(Floats(answer.responses.at(0).completion().logprobs()),
                           ScoreByDefinition(dir_.File("second"), probe_, {}).completion.logprobs));
}

TEST_F(ScorerServiceTest, UpdatesWeightsFromAStream) {
  Start();
  v1::UpdateWeightsRequest request;
  request.set_model_path("second");
  v1::UpdateWeightsResponse response;
  ISOBIT_ASSERT_OK(Update(request, &response));
  const std::string digest = response.current().digest();
  request.set_model_path("first");
  ISOBIT_ASSERT_OK(Update(request));

  const auto weights = testing_support::RandomWeights(config_, 2);
  std::vector<v1::WeightChunk> messages = testing_support::MessagesOf(config_, weights);
  const v1::WeightChunk last = messages[messages.size() - 2];
  messages[messages.size() - 2] = messages[1];
  EXPECT_THAT(testing_support::Send(*stub_, messages, response),
              StatusIs(kInvalid, AllOf(HasSubstr("tensor \"model.embed_tokens.weight\""),
                                       HasSubstr("have come before"))));
  messages[messages.size() - 2] = last;
  messages[0].mutable_begin()->set_in_flight_mode(v1::IN_FLIGHT_MODE_RECOMPUTE_KV);
  EXPECT_THAT(testing_support::Send(*stub_, messages, response),
              StatusIs(kInvalid, HasSubstr("RECOMPUTE_KV")));
  messages[0].mutable_begin()->clear_in_flight_mode();
  messages.back().mutable_end()->set_expected_digest("00");
  EXPECT_THAT(testing_support::Send(*stub_, messages, response),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(digest)));
  EXPECT_EQ(Info().server().weight_version().id(), 3u);

  messages.back().mutable_end()->set_expected_digest(digest);
  ISOBIT_ASSERT_OK(testing_support::Send(*stub_, messages, response));
  EXPECT_EQ(response.current().digest(), digest);
  EXPECT_EQ(response.current().id(), 4u);
  const Answer answer = Call(RequestOf({probe_}));
  ISOBIT_ASSERT_OK(answer.status);
  EXPECT_TRUE(BitwiseEqual(Floats(answer.responses.at(0).completion().logprobs()),
                           ScoreByDefinition(dir_.File("second"), probe_, {}).completion.logprobs));
}

TEST_F(ScorerServiceTest, RefusesBadUpdates) {
  Start();
  v1::UpdateWeightsRequest request;
  EXPECT_THAT(Update(request), StatusIs(kInvalid, HasSubstr("model path is empty")));
  request.set_model_path("../second");
  EXPECT_THAT(Update(request), StatusIs(kInvalid, HasSubstr("..")));
  request.set_model_path("third");
  EXPECT_THAT(Update(request), StatusIs(absl::StatusCode::kNotFound, HasSubstr("third")));
  request.set_model_path("second");
  request.set_in_flight_mode(v1::IN_FLIGHT_MODE_RECOMPUTE_KV);
  EXPECT_THAT(Update(request), StatusIs(kInvalid, HasSubstr("RECOMPUTE_KV")));
  request.set_in_flight_mode(static_cast<v1::InFlightMode>(12));
  EXPECT_THAT(Update(request), StatusIs(kInvalid, HasSubstr("12")));
  request.clear_in_flight_mode();
  request.set_weight_version(1);
  EXPECT_THAT(Update(request), StatusIs(kInvalid, HasSubstr("weight_version")));
  request.clear_weight_version();
  request.set_expected_digest("00");
  EXPECT_THAT(Update(request),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("digest")));
  EXPECT_EQ(Info().server().weight_version().id(), 1u);
  ISOBIT_EXPECT_OK(Call(RequestOf({probe_})).status);
}

TEST_F(ScorerServiceTest, AnUpdateMayAbortScores) {
  Start();
  gate_.Close();
  Context context;
  const auto reader = stub_->Score(&context, RequestOf(std::vector<ScoreInput>(20, probe_)));
  ASSERT_TRUE(gate_.WaitForArrivals(1));
  v1::UpdateWeightsRequest request;
  request.set_model_path("second");
  request.set_in_flight_mode(v1::IN_FLIGHT_MODE_ABORT);
  v1::UpdateWeightsResponse response;
  std::thread update([&] { ISOBIT_EXPECT_OK(Update(request, &response)); });
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::ABORTED);
  gate_.Open();
  update.join();
  EXPECT_EQ(response.num_aborted(), 1u);
}

TEST_F(ScorerServiceTest, RefusesCallsBeforeTheWeightsAreLoadedAndWhileDraining) {
  Listen();
  EXPECT_THAT(Call(RequestOf({probe_})).status,
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("not loaded")));
  v1::UpdateWeightsRequest update;
  EXPECT_THAT(Update(update), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("not loaded")));
  Context context;
  v1::ScorerServerInfo info;
  EXPECT_EQ(stub_->GetServerInfo(&context, {}, &info).error_code(), grpc::StatusCode::UNAVAILABLE);

  LoadModel();
  ISOBIT_EXPECT_OK(Call(RequestOf({probe_})).status);
  service_->BeginDrain();
  EXPECT_THAT(Call(RequestOf({probe_})).status,
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("draining")));
  EXPECT_THAT(Update(update), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("draining")));
}

}  // namespace
}  // namespace isobit
