// The group, the open update, and the thread that does a call's work.
#include "rollout/service/weight_transfer.h"

#include <algorithm>
#include <condition_variable>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "common/parallel/tcp_store.h"
#include "common/rpc/weight_stream.h"

namespace isobit {
namespace {

constexpr std::chrono::milliseconds kSlice(20);  // of a wait, between two checks
constexpr size_t kPieceBytes = 4 << 20;          // of what a source is given at a time

absl::Status IsClosed() { return absl::UnavailableError("the service is draining"); }

// Waits until the source wants more.
absl::Status AwaitWanted(StreamedSource& source, const std::function<absl::Status()>& check) {
  struct Wanted {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_wanted = false;
  };
  const auto wanted = std::make_shared<Wanted>();  // a reader may call after this wait has ended
  source.WhenWanted([wanted] {
    {
      const std::lock_guard lock(wanted->mutex);
      wanted->is_wanted = true;
    }
    wanted->changed.notify_one();
  });
  std::unique_lock lock(wanted->mutex);
  while (!wanted->is_wanted) {
    ISOBIT_RETURN_IF_ERROR(check());
    wanted->changed.wait_for(lock, kSlice);
  }
  return absl::OkStatus();
}

}  // namespace

// A call that runs.
struct WeightTransfer::Task {
  Caller caller;
  std::atomic<bool> is_replaced{false};

  // Whether its work is still wanted.
  absl::Status Check() const {
    if (is_replaced) return absl::AbortedError("another call has ended this weight transfer");
    return CheckAwaited(caller.is_abandoned, "weight transfer");
  }
};

// How the service's update ends, which it has begun and shares.
struct WeightTransfer::Outcome {
  v1::UpdateWeightsResponse response;  // once it has ended

  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::shared_ptr<StreamedSource> source;  // null: it has ended, and nobody keeps its memory
  IsAbandoned is_abandoned;                // of the caller who finishes
  bool is_dropped = false;
  bool has_ended = false;
  absl::Status status;

  bool IsUnwanted() {
    const std::lock_guard lock(mutex);  // while it asks, so that the call does not end meanwhile
    return is_dropped || (is_abandoned && is_abandoned());
  }
  void End(const absl::Status& with) {
    {
      const std::lock_guard lock(mutex);
      has_ended = true;
      status = with;
      source = nullptr;
    }
    changed.notify_all();
  }
  // The error that ended it; OK while it has not ended.
  absl::Status Failure() {
    const std::lock_guard lock(mutex);
    return status;
  }
  std::shared_ptr<StreamedSource> Source() {
    const std::lock_guard lock(mutex);
    return source;
  }
  // Waits until it has ended. A service that is being closed may never end it.
  absl::Status Await(const std::atomic<bool>& is_closed) {
    std::unique_lock lock(mutex);
    while (!has_ended) {
      if (is_closed) return IsClosed();
      changed.wait_for(lock, kSlice);
    }
    return status;
  }
};

WeightTransfer::WeightTransfer(Service service, WeightTransferOptions options)
    : service_(std::move(service)), options_(std::move(options)) {}

WeightTransfer::~WeightTransfer() {
  Close();
  if (worker_.joinable()) worker_.join();
}

void WeightTransfer::Close() {
  if (is_closed_.exchange(true)) return;
  const std::lock_guard lock(mutex_);
  if (current_ != nullptr) current_->is_replaced = true;
  worker_ = std::thread([this, previous = std::move(worker_)]() mutable {
    if (previous.joinable()) previous.join();
    Leave(IsClosed());
  });
}

void WeightTransfer::Run(bool replaces, Caller caller, Work work) {
  const auto task = std::make_shared<Task>();
  task->caller = std::move(caller);
  absl::Status refused;
  {
    const std::lock_guard lock(mutex_);
    if (is_closed_) {
      refused = IsClosed();
    } else if (current_ != nullptr && !replaces && current_->Check().ok()) {
      refused = absl::AbortedError("another call of a weight transfer is in progress");
    } else {
      if (current_ != nullptr) current_->is_replaced = true;
      current_ = task;
      worker_ = std::thread(
          [this, task, work = std::move(work), previous = std::move(worker_)]() mutable {
            if (previous.joinable()) previous.join();
            absl::Status status = task->Check();
            if (status.ok()) status = work(*task);
            if (!status.ok()) ISOBIT_LOG(Warning) << "weight transfer: " << status.ToString();
            {
              const std::lock_guard ended(mutex_);
              if (current_ == task) current_ = nullptr;
            }
            task->caller.answer(status);
          });
    }
  }
  if (!refused.ok()) return task->caller.answer(refused);
  if (replaces) service_.wake();  // the engine may hold what a replaced call waits for
}

void WeightTransfer::Init(TransferGroup group, Caller caller) {
  Run(true, std::move(caller),
      [this, group = std::move(group)](const Task& task) { return Join(group, task); });
}

absl::Status WeightTransfer::Join(const TransferGroup& group, const Task& task) {
  Leave(absl::AbortedError("the trainer begins anew"));
  if (options_.join == nullptr) {
    return absl::UnimplementedError("this service can join no trainer's group");
  }
  const PeerWait wait{.deadline = std::chrono::steady_clock::now() + options_.join_timeout,
                      .check = [&] { return task.Check(); }};
  BroadcastGroup joined = group.group;
  if (!group.store_host.empty()) {
    ISOBIT_ASSIGN_OR_RETURN(joined.id, GroupIdInStore(group.store_host, group.store_port, wait));
  }
  ISOBIT_ASSIGN_OR_RETURN(group_, options_.join(joined, wait));
  packing_ = group.packing;
  ISOBIT_LOG(Info) << "joined a trainer's group of " << joined.size << " as rank " << joined.rank;
  return absl::OkStatus();
}

void WeightTransfer::Shutdown(Caller caller) {
  Run(true, std::move(caller), [this](const Task&) {
    Leave(absl::AbortedError("the weight transfer was shut down"));
    return absl::OkStatus();
  });
}

void WeightTransfer::Leave(const absl::Status& reason) {
  Drop(reason);
  group_ = nullptr;
  last_listed_.clear();
}

void WeightTransfer::Drop(const absl::Status& reason) {
  const std::unique_ptr<OpenUpdate> update = std::move(update_);
  if (update == nullptr || update->outcome == nullptr) return;
  Outcome& outcome = *update->outcome;
  {
    const std::lock_guard lock(outcome.mutex);
    outcome.is_dropped = true;
  }
  if (const auto source = outcome.Source()) source->Fail(reason);
  service_.wake();
  static_cast<void>(outcome.Await(is_closed_));
}

void WeightTransfer::Start(WeightUpdate update, Caller caller) {
  Run(false, std::move(caller), [this, update = std::move(update)](const Task&) -> absl::Status {
    if (group_ == nullptr) {
      return absl::FailedPreconditionError("no trainer's group: call InitWeightTransfer first");
    }
    Drop(absl::AbortedError("the trainer begins another update"));
    update_ = std::make_unique<OpenUpdate>();
    update_->update = update;
    return absl::OkStatus();
  });
}

void WeightTransfer::Receive(const v1::ReceiveWeightsRequest& request,
                             v1::ReceiveWeightsResponse* response, Caller caller) {
  Run(false, std::move(caller), [this, request, response](const Task& task) -> absl::Status {
    absl::Status received = ReceiveAsked(request, task, *response);
    if (received.ok()) return received;
    // The update's own error says more than what the receiver met.
    absl::Status failure;
    if (update_ != nullptr && update_->outcome != nullptr) failure = update_->outcome->Failure();
    Leave(received);
    return failure.ok() ? received : failure;
  });
}

absl::Status WeightTransfer::ReceiveAsked(const v1::ReceiveWeightsRequest& request,
                                          const Task& task, v1::ReceiveWeightsResponse& response) {
  if (group_ == nullptr || update_ == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("no update is open: call ", group_ == nullptr ? "InitWeightTransfer and " : "",
                     "StartWeightTransfer first"));
  }
  ISOBIT_ASSIGN_OR_RETURN(std::vector<Tensor> listed, TensorsFromProto(request.tensors()));
  if (listed.empty()) listed = last_listed_;
  if (listed.empty()) {
    return absl::InvalidArgumentError(
        "tensors: expected some, got none: no earlier call in this group has listed any");
  }
  std::shared_ptr<Outcome> outcome = update_->outcome;
  if (outcome == nullptr) {
    ISOBIT_ASSIGN_OR_RETURN(outcome, Plan(listed));
  }
  ISOBIT_ASSIGN_OR_RETURN(const std::vector<size_t> numbers,
                          NumbersOf(listed, update_->tensors, update_->came));
  const std::vector<Broadcast> broadcasts =
      BroadcastsOf(numbers, update_->tensors, ReadPacking(request, packing_));
  size_t longest = 0;
  uint64_t num_bytes = 0;
  for (const Broadcast& broadcast : broadcasts) longest = std::max(longest, broadcast.bytes);
  // Before the new weights are planned, which take what memory there is.
  ISOBIT_RETURN_IF_ERROR(group_->Reserve(longest));
  if (update_->outcome == nullptr) ISOBIT_RETURN_IF_ERROR(Begin(outcome));
  for (const Broadcast& broadcast : broadcasts) {
    ISOBIT_RETURN_IF_ERROR(ReceiveBroadcast(broadcast, task));
    num_bytes += broadcast.bytes;
  }
  response.set_num_bytes(num_bytes);
  last_listed_ = std::move(listed);
  update_->came.insert(numbers.begin(), numbers.end());
  return group_->Reserve(0);
}

absl::StatusOr<std::shared_ptr<WeightTransfer::Outcome>> WeightTransfer::Plan(
    std::vector<Tensor> listed) {
  std::vector<Tensor> tensors = WithUnlisted(std::move(listed), service_.plan);
  auto outcome = std::make_shared<Outcome>();
  ISOBIT_ASSIGN_OR_RETURN(
      outcome->source,
      StreamedSource::Create(tensors, service_.plan, service_.policy, service_.limits));
  for (Tensor& tensor : tensors) {
    ISOBIT_ASSIGN_OR_RETURN(tensor.size_bytes, TensorBytes(tensor.dtype, tensor.shape));
  }
  update_->tensors = std::move(tensors);
  return outcome;
}

absl::Status WeightTransfer::Begin(const std::shared_ptr<Outcome>& outcome) {
  update_->outcome = outcome;
  WeightUpdate update = update_->update;
  update.stream = outcome->source;
  update.is_abandoned = [outcome] { return outcome->IsUnwanted(); };
  service_.begin(std::move(update), &outcome->response,
                 [outcome](const absl::Status& status) { outcome->End(status); });
  return outcome->Failure();
}

absl::Status WeightTransfer::ReceiveBroadcast(const Broadcast& broadcast, const Task& task) {
  Outcome& outcome = *update_->outcome;
  const std::shared_ptr<StreamedSource> source = outcome.Source();
  const auto check = [&]() -> absl::Status {
    ISOBIT_RETURN_IF_ERROR(task.Check());
    return outcome.Failure();
  };
  ISOBIT_RETURN_IF_ERROR(check());
  ISOBIT_RETURN_IF_ERROR(AwaitWanted(*source, check));
  ISOBIT_RETURN_IF_ERROR(group_->Begin(broadcast.bytes, service_.limits.max_silence, check));
  for (const size_t number : broadcast.tensors) {
    const size_t size = update_->tensors[number].size_bytes;
    for (size_t offset = 0; offset < size; offset += kPieceBytes) {
      ISOBIT_RETURN_IF_ERROR(AwaitWanted(*source, check));
      std::string piece(std::min(kPieceBytes, size - offset), '\0');
      ISOBIT_RETURN_IF_ERROR(group_->Read(piece.data(), piece.size()));
      ISOBIT_RETURN_IF_ERROR(source->Add(number, offset, std::move(piece)));
    }
  }
  return absl::OkStatus();
}

void WeightTransfer::Finish(const v1::FinishWeightTransferRequest& request,
                            v1::UpdateWeightsResponse* response, Caller caller) {
  Run(false, std::move(caller),
      [this, digest = request.expected_digest(), response](const Task& task) {
        return FinishUpdate(digest, task, *response);
      });
}

absl::Status WeightTransfer::FinishUpdate(const std::string& expected_digest, const Task& task,
                                          v1::UpdateWeightsResponse& response) {
  const std::unique_ptr<OpenUpdate> update = std::move(update_);
  if (update == nullptr) {
    return absl::FailedPreconditionError("no update is open: call StartWeightTransfer first");
  }
  if (update->outcome == nullptr) {
    return absl::FailedPreconditionError("nothing was received since StartWeightTransfer");
  }
  Outcome& outcome = *update->outcome;
  {
    const std::lock_guard lock(outcome.mutex);
    outcome.is_abandoned = [&task] { return !task.Check().ok(); };
  }
  // Its error is the update's, too.
  if (const auto source = outcome.Source()) static_cast<void>(source->End(expected_digest));
  const absl::Status ended = outcome.Await(is_closed_);
  {
    const std::lock_guard lock(outcome.mutex);
    outcome.is_abandoned = nullptr;  // the call ends
    if (!outcome.has_ended) outcome.is_dropped = true;
  }
  if (ended.ok()) response = outcome.response;
  return ended;
}

}  // namespace isobit
