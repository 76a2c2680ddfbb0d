// The vLLM face over real connections, beside isobit.v1 on the same engine: what it sends has the
// same bits, and what it holds is counted.
#include "rollout/service/vllm_service.h"

#include <atomic>
#include <chrono>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/access/held_bytes.h"
#include "common/rpc/channel.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/rollout/service/service_fixture.h"
#include "tests/support/bitwise.h"
#include "tests/support/metric_value.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using absl::StatusCode;
using testing::HasSubstr;
using testing_support::BitwiseEqual;
using testing_support::MetricValue;
using testing_support::StatusIs;
using Stub = vllm_wire::VllmEngine::Stub;

// All that one call returned, by sample.
struct Answer {
  absl::Status status;
  std::map<uint32_t, vllm_wire::GenerateComplete> chunks;  // their tokens, joined
  std::map<uint32_t, vllm_wire::GenerateComplete> last;    // likewise, of the last chunk
  std::map<uint32_t, vllm_wire::GenerateComplete> ends;
};

std::vector<float> LogProbs(const vllm_wire::GenerateComplete& tokens) {
  const auto& logprobs = tokens.output_logprobs().token_logprobs();
  return {logprobs.begin(), logprobs.end()};
}

std::vector<uint32_t> Ids(const google::protobuf::RepeatedField<uint32_t>& ids) {
  return {ids.begin(), ids.end()};
}

class VllmServiceTest : public ServiceFixture {
 protected:
  void StartFace(const EngineOptions& options, bool load = true, const StreamLimits& limits = {}) {
    StartServer(options, load, limits);
    face_ = std::make_unique<VllmService>(
        *service_, *engine_,
        VllmModelNames{.served = "m", .directory = "/models/m", .tokenizer = ""},
        [this] { return serving_.load(); });
    server_ = std::make_unique<ServerRunner>(ServerOptions{});
    server_->Register(face_.get(), vllm_wire::VllmEngine::service_full_name());
    ISOBIT_ASSERT_OK(server_->Start());
    client_ =
        vllm_wire::VllmEngine::NewStub(MakeChannel(absl::StrCat("127.0.0.1:", server_->port())));
  }
  void TearDown() override {
    server_.reset();
    ServiceFixture::TearDown();
  }

  // As MakeProto.
  static vllm_wire::GenerateRequest MakeVllm(bool stream) {
    const v1::GenerateRequest proto = MakeProto();
    vllm_wire::GenerateRequest request;
    *request.mutable_tokenized()->mutable_input_ids() = proto.prompt_token_ids();
    request.set_stream(stream);
    vllm_wire::SamplingParams& sampling = *request.mutable_sampling_params();
    sampling.set_seed(static_cast<int32_t>(proto.sampling().seed()));
    sampling.set_max_tokens(proto.sampling().max_tokens());
    sampling.set_ignore_eos(true);
    sampling.set_logprobs(0);
    return request;
  }

  Answer Ask(const vllm_wire::GenerateRequest& request) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    const auto reader = client_->Generate(&context, request);
    return Collect(*reader, context);
  }

  // What is left of a stream.
  static Answer Collect(grpc::ClientReader<vllm_wire::GenerateResponse>& reader,
                        grpc::ClientContext& context) {
    Answer answer;
    vllm_wire::GenerateResponse response;
    while (reader.Read(&response)) {
      if (response.has_complete()) {
        answer.ends[response.complete().index()] = response.complete();
        continue;
      }
      const vllm_wire::GenerateStreamChunk& chunk = response.chunk();
      EXPECT_EQ(answer.ends.count(chunk.index()), 0u) << "a chunk after the end of its sample";
      EXPECT_EQ(chunk.completion_tokens(), static_cast<uint32_t>(chunk.token_ids_size()));
      EXPECT_EQ(chunk.prompt_tokens(), 5u);
      vllm_wire::GenerateComplete& last = answer.last[chunk.index()];
      *last.mutable_output_ids() = chunk.token_ids();
      *last.mutable_output_logprobs() = chunk.output_logprobs();
      answer.chunks[chunk.index()].MergeFrom(last);
    }
    answer.status = FromGrpcStatus(reader.Finish(), context);
    return answer;
  }

  template <typename Request, typename Response>
  absl::Status CallFace(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                     Response*),
                        const Request& request, Response& response) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    return FromGrpcStatus(((*client_).*method)(&context, request, &response), context);
  }

  // Memory of results that nobody has read, and of the calls themselves.
  double HeldBytes() { return MetricValue(*metrics_, "isobit_held_bytes", {{"of", "results"}}); }
  // When the last tokens have been handed over, and nothing is read.
  double AwaitSteadyHeldBytes() {
    double held = 0;
    while (held != HeldBytes()) {
      held = HeldBytes();
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    return held;
  }
  void AwaitNothingHeld() {
    for (int i = 0; i < 10'000 && HeldBytes() > 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(HeldBytes(), 0);
  }

  std::atomic<bool> serving_{true};
  std::unique_ptr<VllmService> face_;
  std::unique_ptr<ServerRunner> server_;
  std::unique_ptr<Stub> client_;
};

// INVARIANT: both faces send the same tokens and bits.
TEST_F(VllmServiceTest, SendsTheBitsOfIsobitV1) {
  StartFace(DefaultOptions());
  v1::GenerateRequest proto = MakeProto();
  proto.mutable_sampling()->set_n(3);
  proto.mutable_sampling()->set_logprobs(2);
  const Generated expected = Generate(proto);
  ISOBIT_ASSERT_OK(expected.status);
  for (const bool stream : {false, true}) {
    vllm_wire::GenerateRequest request = MakeVllm(stream);
    request.mutable_sampling_params()->set_n(3);
    request.mutable_sampling_params()->set_logprobs(2);
    Answer answer = Ask(request);
    ISOBIT_ASSERT_OK(answer.status);
    ASSERT_EQ(answer.ends.size(), 3u);
    EXPECT_EQ(answer.chunks.size(), stream ? 3u : 0u);
    for (const auto& [sample, tokens] : expected.tokens) {
      const vllm_wire::GenerateComplete& end = answer.ends.at(sample);
      const vllm_wire::GenerateComplete& whole = stream ? answer.chunks.at(sample) : end;
      EXPECT_EQ(Ids(whole.output_ids()), Ids(tokens.token_ids()));
      EXPECT_EQ(Ids(whole.output_logprobs().token_ids()), Ids(tokens.token_ids()));
      const std::vector<float> logprobs(tokens.logprobs().begin(), tokens.logprobs().end());
      EXPECT_TRUE(BitwiseEqual(LogProbs(whole), logprobs));
      ASSERT_EQ(whole.output_logprobs().top_logprobs_size(), tokens.top_size());
      for (int i = 0; i < tokens.top_size(); ++i) {
        const auto& [values, ids] = std::pair(whole.output_logprobs().top_logprobs(i).values(),
                                              whole.output_logprobs().top_logprobs(i).token_ids());
        EXPECT_EQ(Ids(ids), Ids(tokens.top(i).token_ids()));
        const auto& top = tokens.top(i).logprobs();
        EXPECT_TRUE(BitwiseEqual(std::vector<float>(values.begin(), values.end()),
                                 std::vector<float>(top.begin(), top.end())));
      }
      if (stream) {
        EXPECT_EQ(Ids(end.output_ids()), Ids(answer.last.at(sample).output_ids()))
            << "those of the last chunk once more";
        EXPECT_TRUE(BitwiseEqual(LogProbs(end), LogProbs(answer.last.at(sample))));
      }
      EXPECT_EQ(end.completion_tokens(), static_cast<uint32_t>(end.output_ids_size()));
      EXPECT_EQ(end.finish_reason(), "length");
      EXPECT_EQ(end.prompt_tokens(), 5u);
      std::vector<float> control = logprobs;
      control[3] = std::nextafter(control[3], 0.0f);
      EXPECT_FALSE(BitwiseEqual(LogProbs(whole), control)) << "control: one bit";
    }
    request.mutable_sampling_params()->set_seed(12);
    EXPECT_NE(Ids(Ask(request).ends.at(0).output_ids()), Ids(answer.ends.at(0).output_ids()))
        << "control: another seed";
  }
}

TEST_F(VllmServiceTest, LogProbsComeOnlyWhereAsked) {
  StartFace(DefaultOptions());
  vllm_wire::GenerateRequest request = MakeVllm(/*stream=*/false);
  EXPECT_EQ(Ask(request).ends.at(0).output_logprobs().token_logprobs_size(), 8);
  EXPECT_EQ(Ask(request).ends.at(0).output_logprobs().top_logprobs_size(), 0);
  request.mutable_sampling_params()->clear_logprobs();
  EXPECT_FALSE(Ask(request).ends.at(0).has_output_logprobs());
  EXPECT_EQ(Ask(request).ends.at(0).output_ids_size(), 8);
}

TEST_F(VllmServiceTest, RefusesByName) {
  StartFace(DefaultOptions());
  vllm_wire::GenerateRequest request = MakeVllm(/*stream=*/true);
  request.mutable_sampling_params()->add_stop("x");
  EXPECT_THAT(Ask(request).status,
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("sampling_params.stop")));
  request = MakeVllm(/*stream=*/true);
  request.mutable_sampling_params()->set_top_p(1.5f);
  EXPECT_THAT(Ask(request).status,
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("sampling_params.top_p")));
  request = MakeVllm(/*stream=*/true);
  request.clear_tokenized();
  EXPECT_THAT(Ask(request).status,
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("tokenized.input_ids")));
  request = MakeVllm(/*stream=*/true);
  request.mutable_tokenized()->add_input_ids(1u << 31);
  EXPECT_THAT(Ask(request).status,
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("tokenized.input_ids[5]")));
}

TEST_F(VllmServiceTest, AbortEndsARequestOfEitherFace) {
  StartFace(DefaultOptions());
  vllm_wire::GenerateRequest request = MakeVllm(/*stream=*/true);
  request.set_request_id("long");
  request.mutable_sampling_params()->clear_max_tokens();
  grpc::ClientContext context;
  const auto reader = client_->Generate(&context, request);
  vllm_wire::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_THAT(Ask(request).status, StatusIs(StatusCode::kAlreadyExists, HasSubstr("long")));
  vllm_wire::AbortRequest abort;
  vllm_wire::AbortResponse aborted;
  abort.add_request_ids("unknown");
  abort.add_request_ids("long");
  ISOBIT_EXPECT_OK(CallFace(&Stub::Abort, abort, aborted));
  while (reader->Read(&response)) {
  }
  ISOBIT_EXPECT_OK(FromGrpcStatus(reader->Finish(), context));
  EXPECT_EQ(response.complete().finish_reason(), "abort");

  grpc::ClientContext other;
  const auto v1_reader = stub_->Generate(&other, MakeLongProto("long"));
  ReadFirstToken(*v1_reader);
  ISOBIT_EXPECT_OK(CallFace(&Stub::Abort, abort, aborted));
  Generated generated;
  ReadAll(*v1_reader, other, generated);
  EXPECT_EQ(generated.complete.at(0).finish_reason(), v1::FINISH_REASON_ABORT);
}

TEST_F(VllmServiceTest, AClientThatGoesEndsItsRequest) {
  StartFace(DefaultOptions());
  vllm_wire::GenerateRequest request = MakeVllm(/*stream=*/true);
  request.mutable_sampling_params()->clear_max_tokens();
  grpc::ClientContext context;
  const auto reader = client_->Generate(&context, request);
  vllm_wire::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  context.TryCancel();
  reader->Finish();
  AwaitLoad([](const v1::GetLoadResponse& load) {
    return load.num_running_requests() == 0 && load.num_used_pages() == 0;
  });
}

// Sixteen samples with many alternatives.
vllm_wire::GenerateRequest Bulky(vllm_wire::GenerateRequest request) {
  request.mutable_sampling_params()->set_n(16);
  request.mutable_sampling_params()->set_logprobs(64);
  request.mutable_sampling_params()->set_max_tokens(100);
  return request;
}

// INVARIANT: what waits for a slow reader is counted, given back, and arrives as it was.
TEST_F(VllmServiceTest, ASlowReaderGetsEverythingAndItsBytesAreCounted) {
  EngineOptions options = DefaultOptions();
  options.runner.num_pages = 16 * 32;
  StartFace(options);
  const auto narrow = vllm_wire::VllmEngine::NewStub(NarrowChannel(server_->port()));
  for (const bool stream : {false, true}) {
    const vllm_wire::GenerateRequest request = Bulky(MakeVllm(stream));
    const Answer prompt = Ask(request);
    ISOBIT_ASSERT_OK(prompt.status);
    AwaitNothingHeld();
    grpc::ClientContext context;
    const auto reader = narrow->Generate(&context, request);
    reader->WaitForInitialMetadata();
    AwaitLoad([](const v1::GetLoadResponse& load) { return load.num_running_requests() == 0; });
    // A sample has 100 * 64 alternatives of 8 bytes each. The connection takes one or two.
    EXPECT_GT(AwaitSteadyHeldBytes(), 12 * 100 * 64 * 8);
    const Answer slow = Collect(*reader, context);
    ISOBIT_ASSERT_OK(slow.status);
    ASSERT_EQ(slow.ends.size(), 16u);
    for (const auto& [sample, end] : prompt.ends) {
      const auto& whole = stream ? slow.chunks : slow.ends;
      const auto& expected = stream ? prompt.chunks : prompt.ends;
      EXPECT_EQ(whole.at(sample).output_logprobs().SerializeAsString(),
                expected.at(sample).output_logprobs().SerializeAsString());
      EXPECT_EQ(whole.at(sample).output_ids_size(), 100);
    }
    AwaitNothingHeld();
  }
}

// INVARIANT: so is what has been joined and waits for the message before it.
TEST_F(VllmServiceTest, JoinedTokensAreCounted) {
  EngineOptions options = DefaultOptions();
  options.runner.num_pages = 16 * 32;
  StartFace(options);
  const auto narrow = vllm_wire::VllmEngine::NewStub(NarrowChannel(server_->port()));
  vllm_wire::GenerateRequest request = Bulky(MakeVllm(/*stream=*/false));
  request.mutable_sampling_params()->set_n(2);
  request.mutable_sampling_params()->set_max_tokens(190);
  grpc::ClientContext context;
  const auto reader = narrow->Generate(&context, request);
  reader->WaitForInitialMetadata();
  AwaitLoad([](const v1::GetLoadResponse& load) { return load.num_running_requests() == 0; });
  // One sample is in flight, as an object and as bytes. The other waits, joined.
  EXPECT_GT(AwaitSteadyHeldBytes(), 3 * 190 * 64 * 8);
  EXPECT_EQ(Collect(*reader, context).ends.size(), 2u);
  AwaitNothingHeld();
}

TEST_F(VllmServiceTest, JoinedTokensHaveABound) {
  StreamLimits limits;
  limits.results = {.total = kCallBytes + 20'000, .client_share = 1.0};
  StartFace(DefaultOptions(), /*load=*/true, limits);
  vllm_wire::GenerateRequest request = MakeVllm(/*stream=*/false);
  ISOBIT_EXPECT_OK(Ask(request).status);
  request.mutable_sampling_params()->set_max_tokens(190);
  request.mutable_sampling_params()->set_logprobs(16);
  AwaitNothingHeld();
  EXPECT_THAT(Ask(request).status, StatusIs(StatusCode::kResourceExhausted, HasSubstr("read")));
  AwaitNothingHeld();
  ISOBIT_EXPECT_OK(Ask(MakeVllm(/*stream=*/false)).status);
}

TEST_F(VllmServiceTest, AnswersAboutItself) {
  StartFace(DefaultOptions());
  vllm_wire::HealthCheckResponse health;
  ISOBIT_ASSERT_OK(CallFace(&Stub::HealthCheck, vllm_wire::HealthCheckRequest(), health));
  EXPECT_TRUE(health.healthy());
  serving_ = false;
  ISOBIT_ASSERT_OK(CallFace(&Stub::HealthCheck, vllm_wire::HealthCheckRequest(), health));
  EXPECT_FALSE(health.healthy());

  v1::RolloutServerInfo v1_info;
  ISOBIT_ASSERT_OK(
      Call(&v1::RolloutService::Stub::GetServerInfo, *stub_, v1::GetServerInfoRequest(), v1_info));
  vllm_wire::GetModelInfoResponse model;
  ISOBIT_ASSERT_OK(CallFace(&Stub::GetModelInfo, vllm_wire::GetModelInfoRequest(), model));
  EXPECT_EQ(model.served_model_name(), "m");
  EXPECT_EQ(model.max_context_length(), v1_info.server().model().context_length());
  EXPECT_EQ(model.vocab_size(), v1_info.server().model().vocab_size());

  vllm_wire::GetServerInfoResponse info;
  ISOBIT_ASSERT_OK(CallFace(&Stub::GetServerInfo, vllm_wire::GetServerInfoRequest(), info));
  EXPECT_EQ(info.last_receive_timestamp(), 0.0);
  EXPECT_EQ(info.active_requests(), 0u);
  EXPECT_FALSE(info.is_paused());
  EXPECT_EQ(info.server_type(), "isobit");
  EXPECT_EQ(info.data_parallel_size(), 1);
  ISOBIT_ASSERT_OK(Ask(MakeVllm(/*stream=*/false)).status);
  v1::PauseGenerationResponse paused;
  ISOBIT_ASSERT_OK(Call(&v1::RolloutService::Stub::PauseGeneration, *stub_,
                        v1::PauseGenerationRequest(), paused));
  ISOBIT_ASSERT_OK(CallFace(&Stub::GetServerInfo, vllm_wire::GetServerInfoRequest(), info));
  EXPECT_GT(info.last_receive_timestamp(), 1.7e9);
  EXPECT_TRUE(info.is_paused());

  vllm_wire::GetLoadsResponse loads;
  vllm_wire::GetLoadsRequest request;
  ISOBIT_ASSERT_OK(CallFace(&Stub::GetLoads, request, loads));
  EXPECT_EQ(loads.version(), v1_info.server().version());
  ASSERT_EQ(loads.loads_size(), 1);
  EXPECT_EQ(loads.loads(0).max_total_num_tokens(),
            static_cast<int32_t>(v1_info.num_pages() * v1_info.page_size()));
  request.set_dp_rank(1);
  ISOBIT_ASSERT_OK(CallFace(&Stub::GetLoads, request, loads));
  EXPECT_EQ(loads.loads_size(), 0);

  vllm_wire::NotServed nothing;
  EXPECT_THAT(CallFace(&Stub::Embed, vllm_wire::NotServed(), nothing),
              StatusIs(StatusCode::kUnimplemented, HasSubstr("Embed")));
  grpc::ClientContext context;
  const auto reader = client_->SubscribeKvEvents(&context, vllm_wire::NotServed());
  EXPECT_FALSE(reader->Read(&nothing));
  EXPECT_THAT(FromGrpcStatus(reader->Finish(), context),
              StatusIs(StatusCode::kUnimplemented, HasSubstr("SubscribeKvEvents")));
}

TEST_F(VllmServiceTest, WithoutWeightsItRefuses) {
  StartFace(DefaultOptions(), /*load=*/false);
  EXPECT_THAT(Ask(MakeVllm(/*stream=*/true)).status,
              StatusIs(StatusCode::kUnavailable, HasSubstr("weights")));
}

}  // namespace
}  // namespace isobit
