// The server's end of UpdateWeightsFromStream: checks the order of messages and passes the pieces
// to a StreamedSource, no faster than it wants them. The service begins the update and answers.
// Initial metadata tells the sender that the update has begun; until then it sends no tensor.
#ifndef ISOBIT_COMMON_RPC_WEIGHT_STREAM_H_
#define ISOBIT_COMMON_RPC_WEIGHT_STREAM_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/access/call_gate.h"
#include "common/checkpoint/streamed_source.h"
#include "common/checkpoint/tensor_plan.h"
#include "common/checkpoint/weight_switch.h"
#include "isobit/v1/types.pb.h"

namespace isobit {

// A key in the initial metadata of a call whose begin is accepted.
inline constexpr char kWeightsAcceptedKey[] = "weights-accepted";

// The tensors of a list, without data and sizes. INVALID_ARGUMENT, naming the tensor: the dtype is
// unknown.
absl::StatusOr<std::vector<Tensor>> TensorsFromProto(
    const google::protobuf::RepeatedPtrField<v1::StreamedTensor>& list);

// One call. Lives until both gRPC and the answering thread have released it. Once the update has
// begun, every fault goes to the source, whose reader then ends the update with it.
class WeightStream final : public grpc::ServerReadReactor<v1::WeightChunk> {
 public:
  struct Options {
    TensorPlan plan;  // of the model that serves
    LoadPolicy policy;
    WeightStreamLimits limits;
    // Reads the update of a request. A stream's request has no model_path and expected_digest.
    std::function<absl::StatusOr<WeightUpdate>(const v1::UpdateWeightsRequest&)> parse;
    // Begins the update, which has the stream and can tell whether it is abandoned. The code that
    // carries out the update answers `call`. Called at most once.
    std::function<void(WeightUpdate update, const std::shared_ptr<WeightStream>& call)> begin;
    // The client has gone or the deadline has passed. Called at most once; must not block.
    std::function<void()> on_abandoned;
  };

  // The handler of the call: takes one request of the client's quota, and reads. `gate` outlives
  // the call.
  static WeightStream* Start(grpc::CallbackServerContext* context, CallGate& gate, Options options);
  // For a call that is refused before any message is read.
  static WeightStream* Refuse(grpc::CallbackServerContext* context, CallGate& gate,
                              const absl::Status& status);

  // Ends the call. Exactly once, on any thread. If `status` is OK, the client gets the response in
  // its current state.
  void Answer(const absl::Status& status);

  // Whether the sender no longer waits for the answer, or may no longer send. Ask right before the
  // update takes effect. Once true, it stays true. Thread-safe.
  bool is_abandoned() const { return is_abandoned_ || !gate_.Recheck(context_).ok(); }

 private:
  WeightStream(grpc::CallbackServerContext* context, CallGate& gate, Options options)
      : context_(*context), gate_(gate), options_(std::move(options)) {}

  void OnReadDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  // Tells the sender that the update has begun.
  void Accept();
  // Reads the next message, unless the call has been answered.
  void Receive();
  absl::Status Take();
  absl::Status Begin(const v1::WeightStreamBegin& begin);

  grpc::CallbackServerContext& context_;
  CallGate& gate_;
  Options options_;
  std::shared_ptr<WeightStream> self_;  // until OnDone
  v1::WeightChunk chunk_;
  std::atomic<bool> is_abandoned_{false};

  std::mutex mutex_;                        // guards what follows
  std::shared_ptr<StreamedSource> source_;  // null: the update has not begun
  bool answered_ = false;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_WEIGHT_STREAM_H_
