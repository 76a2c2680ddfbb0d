// The exchange with senders, and the thread that notices when they are silent.
#include "common/parallel/nccl_weight_senders.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"
#include "common/parallel/nccl_status.h"

namespace isobit {
namespace {

using Clock = std::chrono::steady_clock;
using cuda::CudaStatus;

constexpr std::chrono::microseconds kPollInterval(50);
constexpr std::chrono::milliseconds kWatchInterval(2);

class NcclWeightSenders final : public WeightSenders {
 public:
  NcclWeightSenders(int device, cudaStream_t stream) : device_(device), stream_(stream) {}
  ~NcclWeightSenders() override {
    StopWatching();
    // Nothing is in flight, so this does not wait. Nobody could handle an error.
    if (comm_ != nullptr) static_cast<void>(ncclCommAbort(comm_));
  }

  absl::Status Join(const SenderGroup& group) override {
    SetNcclEnvironment();
    ISOBIT_RETURN_IF_ERROR(CheckVersion(group));
    ISOBIT_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(device_), "cudaSetDevice"));
    {
      const std::lock_guard lock(mutex_);
      const bool is_in_it = comm_ != nullptr && group_.id == group.id;
      if (group.has_joined && !is_in_it) {
        return absl::FailedPreconditionError(
            "this rank is not in the senders' NCCL group any more; begin with a new group");
      }
      if (!is_in_it) EndGroup(absl::CancelledError("the senders have a new group"));
      group_ = group;
      failure_ = absl::OkStatus();
      last_sign_ = Clock::now();
      if (!is_in_it) ISOBIT_RETURN_IF_ERROR(BeginToJoin());
    }
    if (const absl::Status joined = WaitForCall("NCCL group of the senders"); !joined.ok()) {
      const std::lock_guard lock(mutex_);
      EndGroup(joined);
      return joined;
    }
    watches_ = true;
    watcher_ = std::thread([this] { Watch(); });
    return absl::OkStatus();
  }

  absl::Status Exchange(absl::Span<const SenderTransfer> transfers) override {
    if (transfers.empty()) return absl::OkStatus();
    ISOBIT_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(device_), "cudaSetDevice"));
    {
      const std::lock_guard lock(mutex_);
      ISOBIT_RETURN_IF_ERROR(failure_);
      if (in_flight_.empty()) last_sign_ = Clock::now();
      ISOBIT_RETURN_IF_ERROR(NcclStatus(ncclGroupStart(), "ncclGroupStart", comm_));
      ncclResult_t result = ncclSuccess;
      for (const SenderTransfer& t : transfers) {
        result = t.to_sender ? ncclSend(t.memory, t.bytes, ncclUint8, t.sender, comm_, stream_)
                             : ncclRecv(t.memory, t.bytes, ncclUint8, t.sender, comm_, stream_);
        if (result != ncclSuccess && result != ncclInProgress) break;
      }
      const ncclResult_t ended = ncclGroupEnd();
      ISOBIT_RETURN_IF_ERROR(NcclStatus(result, "transfer of weights", comm_));
      ISOBIT_RETURN_IF_ERROR(NcclStatus(ended, "ncclGroupEnd", comm_));
    }
    ISOBIT_RETURN_IF_ERROR(WaitForCall("transfer of weights"));
    cudaEvent_t event = nullptr;
    ISOBIT_RETURN_IF_ERROR(
        CudaStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event"));
    ISOBIT_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(event, stream_), "cudaEventRecord"));
    const std::lock_guard lock(mutex_);
    in_flight_.push_back(event);
    return failure_;
  }

  absl::Status Leave(const absl::Status& so_far) override {
    StopWatching();
    const std::lock_guard lock(mutex_);
    if (failure_.ok() && !so_far.ok()) EndGroup(so_far);
    for (cudaEvent_t event : in_flight_) cudaEventDestroy(event);
    in_flight_.clear();
    return failure_.ok() ? so_far : failure_;
  }

 private:
  static absl::Status CheckVersion(const SenderGroup& group) {
    int version = 0;
    ISOBIT_RETURN_IF_ERROR(NcclStatus(ncclGetVersion(&version), "ncclGetVersion", nullptr));
    if (group.nccl_version == version) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat("the senders have NCCL ", group.nccl_version,
                                                      ", this service has NCCL ", version,
                                                      ", as ncclGetVersion gives it"));
  }

  // Holds mutex_, as do those below that say so.
  absl::Status BeginToJoin() {
    ncclUniqueId id;
    if (group_.id.size() != sizeof(id.internal)) {
      return absl::InvalidArgumentError(absl::StrCat("an NCCL id of ", group_.id.size(),
                                                     " bytes, expected ", sizeof(id.internal)));
    }
    std::memcpy(id.internal, group_.id.data(), sizeof(id.internal));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    return NcclStatus(
        ncclCommInitRankConfig(&comm_, group_.num_senders + 1, id, group_.num_senders, &config),
        "ncclCommInitRankConfig", nullptr);
  }

  // Waits until NCCL has taken the last call.
  absl::Status WaitForCall(const char* what) {
    while (true) {
      ISOBIT_RETURN_IF_ERROR(group_.check());
      {
        const std::lock_guard lock(mutex_);
        ISOBIT_RETURN_IF_ERROR(failure_);
        ncclResult_t result = ncclSuccess;
        ISOBIT_RETURN_IF_ERROR(NcclStatus(ncclCommGetAsyncError(comm_, &result), what, comm_));
        if (result == ncclInvalidUsage) {
          return absl::InvalidArgumentError(
              absl::StrCat(NcclStatus(result, what, comm_).message(),
                           "; a sender on this rank's GPU shares its weights by CUDA IPC instead"));
        }
        ISOBIT_RETURN_IF_ERROR(NcclStatus(result, what, comm_));
        if (result == ncclSuccess) return absl::OkStatus();
        ISOBIT_RETURN_IF_ERROR(CheckSilence(what));
      }
      std::this_thread::sleep_for(kPollInterval);
    }
  }

  // Holds mutex_.
  absl::Status CheckSilence(const char* what) {
    while (!in_flight_.empty() && cudaEventQuery(in_flight_.front()) != cudaErrorNotReady) {
      cudaEventDestroy(in_flight_.front());
      in_flight_.pop_front();
      last_sign_ = Clock::now();
    }
    if (Clock::now() - last_sign_ <= group_.max_silence) return absl::OkStatus();
    return absl::DeadlineExceededError(absl::StrCat(what, ": the senders have been silent for ",
                                                    group_.max_silence.count(), " ms"));
  }

  // Until StopWatching, or until it has ended the group.
  void Watch() {
    cudaSetDevice(device_);
    std::unique_lock lock(mutex_);
    while (watches_ && failure_.ok()) {
      lock.unlock();
      absl::Status status = group_.check();
      lock.lock();
      ncclResult_t result = ncclSuccess;
      if (status.ok() && failure_.ok()) {
        status = NcclStatus(ncclCommGetAsyncError(comm_, &result), "transfer of weights", comm_);
      }
      if (status.ok()) status = NcclStatus(result, "transfer of weights", comm_);
      if (status.ok() && !in_flight_.empty()) status = CheckSilence("transfer of weights");
      if (!status.ok() && failure_.ok()) EndGroup(status);
      stop_watching_.wait_for(lock, kWatchInterval, [this] { return !watches_; });
    }
  }

  void StopWatching() {
    {
      const std::lock_guard lock(mutex_);
      watches_ = false;
    }
    stop_watching_.notify_all();
    if (watcher_.joinable()) watcher_.join();
  }

  // Holds mutex_. Ends what is in flight, as far as NCCL can.
  void EndGroup(const absl::Status& reason) {
    ISOBIT_CHECK(!reason.ok());
    failure_ = reason;
    if (comm_ == nullptr) return;
    // It may wait for copies that never end, so nothing waits for it. Nobody could handle an error.
    std::thread([comm = std::exchange(comm_, nullptr), device = device_] {
      if (cudaSetDevice(device) == cudaSuccess) static_cast<void>(ncclCommAbort(comm));
    }).detach();
  }

  const int device_;
  const cudaStream_t stream_;
  std::thread watcher_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable stop_watching_;
  bool watches_ = false;
  SenderGroup group_;  // does not change from Join to Leave
  ncclComm_t comm_ = nullptr;
  absl::Status failure_;               // why the group has ended
  std::deque<cudaEvent_t> in_flight_;  // the ends of exchanges, oldest first
  Clock::time_point last_sign_;        // of the senders
};

}  // namespace

std::unique_ptr<WeightSenders> MakeNcclWeightSenders(int device, CUstream_st* stream) {
  return std::make_unique<NcclWeightSenders>(device, stream);
}

}  // namespace isobit
