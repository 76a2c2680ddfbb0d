// A rollout service on a loopback port, over a tiny model, and a client that collects its answers.
#ifndef ISOBIT_TESTS_ROLLOUT_SERVICE_SERVICE_FIXTURE_H_
#define ISOBIT_TESTS_ROLLOUT_SERVICE_SERVICE_FIXTURE_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "common/rpc/server_runner.h"
#include "isobit/v1/rollout.grpc.pb.h"
#include "proto/isobit/status_convert.h"
#include "rollout/engine/engine.h"
#include "rollout/service/rollout_service.h"
#include "tests/rollout/engine/engine_fixture.h"

namespace isobit {

// Everything that one Generate call returned.
struct Generated {
  absl::Status status;
  std::map<uint32_t, v1::TokenLogprobs> tokens;       // by sample
  std::map<uint32_t, v1::GenerateComplete> complete;  // by sample
  size_t num_messages = 0;
  std::string request_id;
};

// A channel to a local port that takes few bytes which nobody reads.
std::shared_ptr<grpc::Channel> NarrowChannel(int port);

using GenerateReader = grpc::ClientReader<v1::GenerateResponse>;

class ServiceFixture : public EngineFixture {
 protected:
  // Starts engine and server. Without `load` no weights are loaded.
  void StartServer(const EngineOptions& options, bool load = true, const StreamLimits& limits = {});
  void StartServer() { StartServer(DefaultOptions()); }
  void TearDown() override;

  // Five prompt tokens, eight to generate, never stops early.
  static v1::GenerateRequest MakeProto(const std::string& id = "");
  // A request that runs until it is ended: it asks for as many tokens as the context allows.
  static v1::GenerateRequest MakeLongProto(const std::string& id);

  Generated Generate(const v1::GenerateRequest& request);
  // Reads what is left of a stream.
  static void ReadAll(GenerateReader& reader, grpc::ClientContext& context, Generated& generated);
  // Reads until the first token has come.
  static void ReadFirstToken(GenerateReader& reader);

  v1::GetLoadResponse GetLoad();
  // Waits until `condition` is true of the load; fails the test after a minute.
  void AwaitLoad(const std::function<bool(const v1::GetLoadResponse&)>& condition);

  WeightStreamLimits weight_stream_;
  WeightTransferOptions transfer_;
  const std::shared_ptr<Metrics> metrics_ = std::make_shared<Metrics>();
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<RolloutService> service_;
  std::unique_ptr<ServerRunner> runner_;
  std::unique_ptr<v1::RolloutService::Stub> stub_;
};

// Calls a unary method of the stub: Call(&Stub::GetLoad, *stub, request, response).
template <typename Request, typename Response>
absl::Status Call(grpc::Status (v1::RolloutService::Stub::*method)(grpc::ClientContext*,
                                                                   const Request&, Response*),
                  v1::RolloutService::Stub& stub, const Request& request, Response& response) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  return FromGrpcStatus((stub.*method)(&context, request, &response), context);
}

}  // namespace isobit

#endif  // ISOBIT_TESTS_ROLLOUT_SERVICE_SERVICE_FIXTURE_H_
