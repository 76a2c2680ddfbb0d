// The rollout service as vllm.grpc.engine.VllmEngine, so that routers made for vLLM can use it. A
// thin layer: RolloutService does the work, with its quotas, bounds on memory, request ids and
// metrics. proto/vllm/grpc/engine/vllm_engine.proto documents each call.
#ifndef ISOBIT_ROLLOUT_SERVICE_VLLM_SERVICE_H_
#define ISOBIT_ROLLOUT_SERVICE_VLLM_SERVICE_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>

#include "rollout/engine/engine.h"
#include "rollout/service/rollout_service.h"
#include "rollout/service/vllm_messages.h"
#include "vllm/grpc/engine/vllm_engine.grpc.pb.h"

namespace isobit {

class VllmService final : public vllm_wire::VllmEngine::CallbackService {
 public:
  // `rollout`, the service of `engine`, and `engine` outlive every call. is_serving: whether the
  // server serves; it must be thread-safe and must not block.
  VllmService(RolloutService& rollout, const Engine& engine, const VllmModelNames& names,
              std::function<bool()> is_serving);

  grpc::ServerWriteReactor<vllm_wire::GenerateResponse>* Generate(
      grpc::CallbackServerContext* context, const vllm_wire::GenerateRequest* request) override;
  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* context,
                                  const vllm_wire::AbortRequest* request,
                                  vllm_wire::AbortResponse* response) override;
  grpc::ServerUnaryReactor* HealthCheck(grpc::CallbackServerContext* context,
                                        const vllm_wire::HealthCheckRequest* request,
                                        vllm_wire::HealthCheckResponse* response) override;
  grpc::ServerUnaryReactor* GetModelInfo(grpc::CallbackServerContext* context,
                                         const vllm_wire::GetModelInfoRequest* request,
                                         vllm_wire::GetModelInfoResponse* response) override;
  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const vllm_wire::GetServerInfoRequest* request,
                                          vllm_wire::GetServerInfoResponse* response) override;
  grpc::ServerUnaryReactor* GetLoads(grpc::CallbackServerContext* context,
                                     const vllm_wire::GetLoadsRequest* request,
                                     vllm_wire::GetLoadsResponse* response) override;
  grpc::ServerUnaryReactor* Embed(grpc::CallbackServerContext* context,
                                  const vllm_wire::NotServed* request,
                                  vllm_wire::NotServed* response) override;
  grpc::ServerWriteReactor<vllm_wire::NotServed>* GetTokenizer(
      grpc::CallbackServerContext* context, const vllm_wire::NotServed* request) override;
  grpc::ServerWriteReactor<vllm_wire::NotServed>* SubscribeKvEvents(
      grpc::CallbackServerContext* context, const vllm_wire::NotServed* request) override;

 private:
  RolloutService& rollout_;
  const Engine& engine_;
  const std::function<bool()> is_serving_;
  const vllm_wire::GetModelInfoResponse model_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::atomic<int64_t> last_received_us_{0};  // microseconds since 1970
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SERVICE_VLLM_SERVICE_H_
