// Starts servers and collects streams. See service_fixture.h.
#include "tests/rollout/service/service_fixture.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <chrono>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/rpc/channel.h"
#include "proto/isobit/status_convert.h"
#include "tests/support/status_matchers.h"

namespace isobit {

std::shared_ptr<grpc::Channel> NarrowChannel(int port) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 16384);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", port),
                                   grpc::InsecureChannelCredentials(), arguments);
}

void ServiceFixture::StartServer(const EngineOptions& options, bool load,
                                 const StreamLimits& limits) {
  if (load) {
    engine_ = MakeEngine(options);
  } else {
    auto engine = Engine::Create(config_, options);
    ISOBIT_ASSERT_OK(engine);
    engine_ = *std::move(engine);
  }
  service_ = std::make_unique<RolloutService>(*engine_, limits, CallGate::Create(), metrics_,
                                              weight_stream_, transfer_);
  runner_ = std::make_unique<ServerRunner>(ServerOptions{});
  runner_->Register(service_.get(), v1::RolloutService::service_full_name());
  ISOBIT_ASSERT_OK(runner_->Start());
  engine_->Start();
  stub_ = v1::RolloutService::NewStub(MakeChannel(absl::StrCat("127.0.0.1:", runner_->port())));
}

void ServiceFixture::TearDown() {
  runner_.reset();
  if (service_ != nullptr) service_->BeginDrain();
  if (engine_ != nullptr) engine_->Stop();
  service_.reset();  // as in isobit-rollout, the engine outlives it
  engine_.reset();
}

v1::GenerateRequest ServiceFixture::MakeProto(const std::string& id) {
  v1::GenerateRequest request;
  request.set_request_id(id);
  for (const uint32_t token : {3, 14, 15, 92, 65}) request.add_prompt_token_ids(token);
  request.mutable_sampling()->set_seed(11);
  request.mutable_sampling()->set_max_tokens(8);
  request.mutable_sampling()->set_ignore_eos(true);
  return request;
}

v1::GenerateRequest ServiceFixture::MakeLongProto(const std::string& id) {
  v1::GenerateRequest request = MakeProto(id);
  request.mutable_sampling()->set_max_tokens(190);
  return request;
}

Generated ServiceFixture::Generate(const v1::GenerateRequest& request) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  const auto reader = stub_->Generate(&context, request);
  Generated generated;
  ReadAll(*reader, context, generated);
  return generated;
}

void ServiceFixture::ReadAll(GenerateReader& reader, grpc::ClientContext& context,
                             Generated& generated) {
  v1::GenerateResponse response;
  while (reader.Read(&response)) {
    ++generated.num_messages;
    generated.request_id = response.request_id();
    if (response.has_chunk()) {
      const uint32_t sample = response.chunk().index();
      EXPECT_EQ(generated.complete.count(sample), 0u) << "a chunk after the end of its sample";
      generated.tokens[sample].MergeFrom(response.chunk().tokens());
    } else {
      generated.complete[response.complete().index()] = response.complete();
    }
  }
  generated.status = FromGrpcStatus(reader.Finish(), context);
}

void ServiceFixture::ReadFirstToken(GenerateReader& reader) {
  v1::GenerateResponse response;
  ASSERT_TRUE(reader.Read(&response));
  ASSERT_TRUE(response.has_chunk());
}

v1::GetLoadResponse ServiceFixture::GetLoad() {
  v1::GetLoadResponse response;
  ISOBIT_EXPECT_OK(
      Call(&v1::RolloutService::Stub::GetLoad, *stub_, v1::GetLoadRequest(), response));
  return response;
}

void ServiceFixture::AwaitLoad(const std::function<bool(const v1::GetLoadResponse&)>& condition) {
  for (int i = 0; i < 60000; ++i) {
    if (condition(GetLoad())) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ADD_FAILURE() << GetLoad().DebugString();
}

}  // namespace isobit
