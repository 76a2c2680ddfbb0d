// The calls of RolloutService that receive what a trainer broadcasts: messages to the transfer and
// back. See rollout_service.h.
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "common/rpc/unary_call.h"
#include "rollout/service/rollout_messages.h"
#include "rollout/service/rollout_service.h"
#include "rollout/service/transfer_requests.h"
#include "rollout/service/weight_transfer.h"

namespace isobit {
namespace {

WeightTransfer::Caller CallerOf(const std::shared_ptr<UnaryCall>& call) {
  return {.is_abandoned = [call] { return call->is_abandoned(); },
          .answer = [call](const absl::Status& status) { call->Answer(status); }};
}

}  // namespace

grpc::ServerUnaryReactor* RolloutService::InitWeightTransfer(
    grpc::CallbackServerContext* context, const v1::InitWeightTransferRequest* request,
    v1::InitWeightTransferResponse* /*response*/) {
  return AnswerLater(context, *gate_, ReadInitWeightTransfer(*request), nullptr,
                     [&](TransferGroup group, const std::shared_ptr<UnaryCall>& call) {
                       transfer_.Init(std::move(group), CallerOf(call));
                     });
}

grpc::ServerUnaryReactor* RolloutService::StartWeightTransfer(
    grpc::CallbackServerContext* context, const v1::StartWeightTransferRequest* request,
    v1::StartWeightTransferResponse* /*response*/) {
  v1::UpdateWeightsRequest update;
  update.set_in_flight_mode(request->in_flight_mode());
  if (request->has_weight_version()) update.set_weight_version(request->weight_version());
  return AnswerLater(context, *gate_, ReadUpdateWeightsRequest(update), nullptr,
                     [&](WeightUpdate opened, const std::shared_ptr<UnaryCall>& call) {
                       transfer_.Start(std::move(opened), CallerOf(call));
                     });
}

grpc::ServerUnaryReactor* RolloutService::ReceiveWeights(grpc::CallbackServerContext* context,
                                                         const v1::ReceiveWeightsRequest* request,
                                                         v1::ReceiveWeightsResponse* response) {
  return AnswerLater(
      context, *gate_, absl::StatusOr<v1::ReceiveWeightsRequest>(*request), nullptr,
      [&](const v1::ReceiveWeightsRequest& asked, const std::shared_ptr<UnaryCall>& call) {
        transfer_.Receive(asked, response, CallerOf(call));
      });
}

grpc::ServerUnaryReactor* RolloutService::FinishWeightTransfer(
    grpc::CallbackServerContext* context, const v1::FinishWeightTransferRequest* request,
    v1::UpdateWeightsResponse* response) {
  return AnswerLater(
      context, *gate_, absl::StatusOr<v1::FinishWeightTransferRequest>(*request),
      [this] { engine_.Wake(); },
      [&](const v1::FinishWeightTransferRequest& asked, const std::shared_ptr<UnaryCall>& call) {
        transfer_.Finish(asked, response, CallerOf(call));
      });
}

grpc::ServerUnaryReactor* RolloutService::ShutdownWeightTransfer(
    grpc::CallbackServerContext* context, const v1::ShutdownWeightTransferRequest* request,
    v1::ShutdownWeightTransferResponse* /*response*/) {
  return AnswerLater(
      context, *gate_, absl::StatusOr<v1::ShutdownWeightTransferRequest>(*request), nullptr,
      [&](const v1::ShutdownWeightTransferRequest&, const std::shared_ptr<UnaryCall>& call) {
        transfer_.Shutdown(CallerOf(call));
      });
}

}  // namespace isobit
