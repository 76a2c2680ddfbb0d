// Weights that a trainer broadcasts to this service with the protocol of vLLM's
// NCCLWeightTransferEngine (InitWeightTransfer and the calls after it in
// proto/isobit/v1/rollout.proto). Keeps the trainer's group and the open update. Arriving weights
// go to a StreamedSource, hence through the same packing, digest and switch as every other update.
// Not here: how bytes travel (common/parallel/weight_broadcast.h).
#ifndef ISOBIT_ROLLOUT_SERVICE_WEIGHT_TRANSFER_H_
#define ISOBIT_ROLLOUT_SERVICE_WEIGHT_TRANSFER_H_

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/awaited.h"
#include "common/checkpoint/load_policy.h"
#include "common/checkpoint/streamed_source.h"
#include "common/checkpoint/tensor_plan.h"
#include "common/checkpoint/weight_switch.h"
#include "common/parallel/weight_broadcast.h"
#include "isobit/v1/rollout.pb.h"
#include "rollout/service/transfer_requests.h"

namespace isobit {

struct WeightTransferOptions {
  // Joins a trainer's group. Null: this service cannot join any.
  JoinWeightBroadcast join = nullptr;
  std::chrono::milliseconds join_timeout{300'000};  // as long as the trainer's store waits
};

// Thread-safe. Only one call works at a time, on a thread of its own.
// INVARIANT: whatever a trainer or a client does wrong, the old weights serve on, and the memory of
// the update is freed (WeightTransferTest.*).
class WeightTransfer {
 public:
  struct Service {
    TensorPlan plan;  // of the model that serves
    LoadPolicy policy;
    WeightStreamLimits limits;
    // Begins an update. When it ends, fills the response and calls `answer`, on any thread.
    std::function<void(WeightUpdate update, v1::UpdateWeightsResponse* response,
                       std::function<void(const absl::Status&)> answer)>
        begin;
    // Tells the service that an update may have been abandoned.
    std::function<void()> wake;
  };
  // The caller. `answer` is called exactly once, on any thread.
  struct Caller {
    IsAbandoned is_abandoned;
    std::function<void(const absl::Status&)> answer;
  };

  WeightTransfer(Service service, WeightTransferOptions options);
  // Ends the running call. The service's update may end later.
  ~WeightTransfer();

  // These abort a running call, which ends with ABORTED.
  void Init(TransferGroup group, Caller caller);
  void Shutdown(Caller caller);
  // ABORTED: another call runs. If the caller of that one has gone, these wait for its end.
  void Start(WeightUpdate update, Caller caller);
  void Receive(const v1::ReceiveWeightsRequest& request, v1::ReceiveWeightsResponse* response,
               Caller caller);
  void Finish(const v1::FinishWeightTransferRequest& request, v1::UpdateWeightsResponse* response,
              Caller caller);

  // Ends all calls, and refuses later ones with UNAVAILABLE.
  void Close();

 private:
  struct Task;
  struct Outcome;

  // The update that ReceiveWeights begins and FinishWeightTransfer ends.
  struct OpenUpdate {
    WeightUpdate update{};             // as StartWeightTransfer gave it
    std::vector<Tensor> tensors{};     // all, by their numbers in the source
    std::set<size_t> came{};           // the numbers of those that have arrived
    std::shared_ptr<Outcome> outcome;  // null: nothing has been received yet
  };

  using Work = std::function<absl::Status(const Task&)>;

  // Runs `work` on the next thread, and answers with its result. replaces: whether it aborts a
  // running call.
  void Run(bool replaces, Caller caller, Work work);

  // The methods below run on the thread of the running call.

  absl::Status Join(const TransferGroup& group, const Task& task);
  // Drops the update and leaves the trainer's group.
  void Leave(const absl::Status& reason);
  // Ends the update, if one is open, and waits until its memory is free.
  void Drop(const absl::Status& reason);
  absl::Status ReceiveAsked(const v1::ReceiveWeightsRequest& request, const Task& task,
                            v1::ReceiveWeightsResponse& response);
  // Plans the update of these tensors and the model's others, without beginning it.
  absl::StatusOr<std::shared_ptr<Outcome>> Plan(std::vector<Tensor> listed);
  absl::Status Begin(const std::shared_ptr<Outcome>& outcome);
  absl::Status ReceiveBroadcast(const Broadcast& broadcast, const Task& task);
  absl::Status FinishUpdate(const std::string& expected_digest, const Task& task,
                            v1::UpdateWeightsResponse& response);

  const Service service_;
  const WeightTransferOptions options_;

  std::unique_ptr<WeightBroadcast> group_;  // null: no group has been joined
  Packing packing_;                         // as InitWeightTransfer gave it
  std::vector<Tensor> last_listed_;         // by the last call that listed tensors
  std::unique_ptr<OpenUpdate> update_;      // null: no update is open

  std::atomic<bool> is_closed_{false};
  std::mutex mutex_;               // guards what follows
  std::shared_ptr<Task> current_;  // null: no call runs
  std::thread worker_;             // runs the last call; joins the thread before it
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SERVICE_WEIGHT_TRANSFER_H_
