// The rollout service on the wire: maps proto messages to the engine and back. Handlers validate,
// enqueue and return; proto/isobit/v1/rollout.proto documents each call.
#ifndef ISOBIT_ROLLOUT_SERVICE_ROLLOUT_SERVICE_H_
#define ISOBIT_ROLLOUT_SERVICE_ROLLOUT_SERVICE_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/access/call_gate.h"
#include "isobit/v1/rollout.grpc.pb.h"
#include "rollout/engine/engine.h"
#include "rollout/service/generate_stream.h"
#include "rollout/service/rollout_metrics.h"
#include "rollout/service/weight_transfer.h"

namespace isobit {

class RolloutService final : public v1::RolloutService::CallbackService {
 public:
  // `engine` outlives every call.
  explicit RolloutService(Engine& engine, const StreamLimits& limits = {},
                          std::shared_ptr<CallGate> gate = CallGate::Create(),
                          std::shared_ptr<Metrics> metrics = std::make_shared<Metrics>(),
                          const WeightStreamLimits& weight_stream = {},
                          const WeightTransferOptions& transfer = {});

  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(
      grpc::CallbackServerContext* context, const v1::GenerateRequest* request) override;
  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* context,
                                  const v1::AbortRequest* request,
                                  v1::AbortResponse* response) override;
  grpc::ServerUnaryReactor* PauseGeneration(grpc::CallbackServerContext* context,
                                            const v1::PauseGenerationRequest* request,
                                            v1::PauseGenerationResponse* response) override;
  grpc::ServerUnaryReactor* ContinueGeneration(grpc::CallbackServerContext* context,
                                               const v1::ContinueGenerationRequest* request,
                                               v1::ContinueGenerationResponse* response) override;
  grpc::ServerUnaryReactor* Sleep(grpc::CallbackServerContext* context,
                                  const v1::SleepRequest* request,
                                  v1::SleepResponse* response) override;
  grpc::ServerUnaryReactor* WakeUp(grpc::CallbackServerContext* context,
                                   const v1::WakeUpRequest* request,
                                   v1::WakeUpResponse* response) override;
  grpc::ServerUnaryReactor* UpdateWeights(grpc::CallbackServerContext* context,
                                          const v1::UpdateWeightsRequest* request,
                                          v1::UpdateWeightsResponse* response) override;
  grpc::ServerReadReactor<v1::WeightChunk>* UpdateWeightsFromStream(
      grpc::CallbackServerContext* context, v1::UpdateWeightsResponse* response) override;
  grpc::ServerUnaryReactor* InitWeightTransfer(grpc::CallbackServerContext* context,
                                               const v1::InitWeightTransferRequest* request,
                                               v1::InitWeightTransferResponse* response) override;
  grpc::ServerUnaryReactor* StartWeightTransfer(grpc::CallbackServerContext* context,
                                                const v1::StartWeightTransferRequest* request,
                                                v1::StartWeightTransferResponse* response) override;
  grpc::ServerUnaryReactor* ReceiveWeights(grpc::CallbackServerContext* context,
                                           const v1::ReceiveWeightsRequest* request,
                                           v1::ReceiveWeightsResponse* response) override;
  grpc::ServerUnaryReactor* FinishWeightTransfer(grpc::CallbackServerContext* context,
                                                 const v1::FinishWeightTransferRequest* request,
                                                 v1::UpdateWeightsResponse* response) override;
  grpc::ServerUnaryReactor* ShutdownWeightTransfer(
      grpc::CallbackServerContext* context, const v1::ShutdownWeightTransferRequest* request,
      v1::ShutdownWeightTransferResponse* response) override;
  grpc::ServerUnaryReactor* Probe(grpc::CallbackServerContext* context,
                                  const v1::ProbeRequest* request,
                                  v1::ProbeResponse* response) override;
  grpc::ServerWriteReactor<v1::TappedSample>* Tap(grpc::CallbackServerContext* context,
                                                  const v1::TapRequest* request) override;
  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const v1::GetServerInfoRequest* request,
                                          v1::RolloutServerInfo* response) override;
  grpc::ServerUnaryReactor* GetLoad(grpc::CallbackServerContext* context,
                                    const v1::GetLoadRequest* request,
                                    v1::GetLoadResponse* response) override;

  // Ends taps, which would never end by themselves, and weight transfers, which may wait long.
  void BeginDrain() {
    tap_.Close();
    transfer_.Close();
  }

  // For the service's other protocol (vllm_service.h), to be called in its handlers.

  // Carries out `request` for the caller and moves its content out. Results go to the writer that
  // `open` makes.
  void Begin(const grpc::CallbackServerContext& context, const v1::GenerateRequest& request,
             OpenGenerateWriter open);
  // Ends those of the requests that the caller may end: its own, or any if it is an admin. Returns
  // the ids that were in flight. Errors: those of CallGate::Recheck.
  absl::StatusOr<std::vector<std::string>> EndRequests(const grpc::CallbackServerContext& context,
                                                       absl::Span<const std::string> ids);
  // Without weights and uptime, which change while the service runs.
  const v1::RolloutServerInfo& info() const { return info_; }

 private:
  std::string NewRequestId();
  // Charges the client's quota for the tokens that `request` brings and may generate.
  absl::Status Admit(const grpc::CallbackServerContext& context,
                     const v1::GenerateRequest& request) const;

  // Ends the requests of all clients. Errors: those of CallGate::Recheck and CheckAdmin.
  absl::StatusOr<std::vector<std::string>> EndAllRequests(
      const grpc::CallbackServerContext& context);

  // Carries out `update`, fills `response`, then calls `answer`.
  void Update(WeightUpdate update, v1::UpdateWeightsResponse* response,
              std::function<void(const absl::Status&)> answer);

  Engine& engine_;
  const WeightStreamLimits weight_stream_;
  const StreamMemory memory_;
  const std::shared_ptr<CallGate> gate_;
  const std::shared_ptr<Metrics> registry_;
  const RolloutMetrics metrics_;
  SampleTap tap_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  const v1::RolloutServerInfo info_;
  const v1::Fingerprint provisional_;  // of samples that provisional steps may draw
  std::atomic<uint64_t> num_ids_{0};
  WeightTransfer transfer_;  // uses the members above
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SERVICE_ROLLOUT_SERVICE_H_
