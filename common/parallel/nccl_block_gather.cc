// The stream, the events that order it with the ops, and NCCL's calls.
#include "common/parallel/nccl_block_gather.h"

#include <cuda_runtime_api.h>

#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"

namespace isobit {
namespace {

constexpr std::chrono::microseconds kPollInterval(50);

absl::Status Checked(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  return cuda::CudaStatus(error, absl::StrCat("gather of weights: ", what));
}

// An event of the present device.
class Event {
 public:
  Event() = default;
  Event(Event&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Event& operator=(Event&&) = delete;
  ~Event() {
    if (handle_ != nullptr) cudaEventDestroy(handle_);
  }
  absl::Status Create(unsigned flags) {
    return Checked(cudaEventCreateWithFlags(&handle_, flags), "event");
  }
  cudaEvent_t get() const { return handle_; }

 private:
  cudaEvent_t handle_ = nullptr;
};

class NcclBlockGather final : public BlockGather {
 public:
  NcclBlockGather(std::unique_ptr<NcclGroup> group, cudaStream_t ops,
                  std::chrono::milliseconds timeout)
      : group_(std::move(group)), ops_(ops), timeout_(timeout) {}

  ~NcclBlockGather() override {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  absl::Status Init(size_t block_bytes) {
    ISOBIT_RETURN_IF_ERROR(Enter());
    // Ops wait for gathers, so gathers get the higher priority.
    int least = 0;
    int greatest = 0;
    ISOBIT_RETURN_IF_ERROR(
        Checked(cudaDeviceGetStreamPriorityRange(&least, &greatest), "priorities"));
    ISOBIT_RETURN_IF_ERROR(
        Checked(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), "stream"));
    for (Buffer& buffer : buffers_) {
      ISOBIT_RETURN_IF_ERROR(buffer.released.Create(cudaEventDisableTiming));
      ISOBIT_ASSIGN_OR_RETURN(buffer.memory, group_->Allocate(block_bytes));
    }
    return absl::OkStatus();
  }

  absl::Status Start(int buffer, const std::byte* shard, size_t bytes) override {
    ISOBIT_RETURN_IF_ERROR(Enter());
    Buffer& to = buffers_[buffer];
    ISOBIT_RETURN_IF_ERROR(NextSpan());
    const Span& span = spans_[num_spans_ - 1];
    // Peers write into the buffer, too; NCCL makes them wait for this rank's stream first.
    ISOBIT_RETURN_IF_ERROR(
        Checked(cudaStreamWaitEvent(stream_, to.released.get()), "wait for the ops"));
    ISOBIT_RETURN_IF_ERROR(Checked(cudaEventRecord(span.begin.get(), stream_), "record"));
    std::byte* const own = to.memory.get() + static_cast<size_t>(group_->rank()) * bytes;
    ISOBIT_RETURN_IF_ERROR(Checked(
        cudaMemcpyAsync(own, shard, bytes, cudaMemcpyDeviceToDevice, stream_), "copy of a shard"));
    ISOBIT_RETURN_IF_ERROR(group_->AllGather(own, to.memory.get(), bytes, stream_));
    ISOBIT_RETURN_IF_ERROR(Checked(cudaEventRecord(span.end.get(), stream_), "record"));
    to.arrived = span.end.get();
    return absl::OkStatus();
  }

  absl::StatusOr<const std::byte*> Use(int buffer) override {
    ISOBIT_RETURN_IF_ERROR(Enter());
    const Buffer& from = buffers_[buffer];
    ISOBIT_RETURN_IF_ERROR(Checked(cudaStreamWaitEvent(ops_, from.arrived), "wait for a block"));
    return from.memory.get();
  }

  absl::Status Release(int buffer) override {
    ISOBIT_RETURN_IF_ERROR(Enter());
    return Checked(cudaEventRecord(buffers_[buffer].released.get(), ops_), "record");
  }

  absl::Status WaitForArrival() override {
    if (num_spans_ == 0) return group_->Check();
    ISOBIT_RETURN_IF_ERROR(Enter());
    const auto deadline = std::chrono::steady_clock::now() + timeout_;
    while (true) {
      const cudaError_t state = cudaEventQuery(spans_[num_spans_ - 1].end.get());
      if (state == cudaSuccess) return group_->Check();
      if (state != cudaErrorNotReady) return Checked(state, "in flight");
      ISOBIT_RETURN_IF_ERROR(group_->Check());
      if (std::chrono::steady_clock::now() >= deadline) {
        const absl::Status late = absl::DeadlineExceededError(
            absl::StrCat("gather of weights: rank ", group_->rank(), " of ", group_->size(),
                         " waits for another rank since ", timeout_.count(), " ms"));
        Abort(late);
        return late;
      }
      std::this_thread::sleep_for(kPollInterval);
    }
  }

  // When this rank's gathers have ended, its shards have been sent.
  absl::Status Finish() override {
    ISOBIT_RETURN_IF_ERROR(WaitForArrival());
    float total = 0.0f;
    for (size_t i = 0; i < num_spans_; ++i) {
      float milliseconds = 0.0f;
      ISOBIT_RETURN_IF_ERROR(Checked(
          cudaEventElapsedTime(&milliseconds, spans_[i].begin.get(), spans_[i].end.get()), "time"));
      total += milliseconds;
    }
    num_spans_ = 0;
    busy_ = std::chrono::microseconds(static_cast<int64_t>(total * 1000.0f));
    return absl::OkStatus();
  }

  std::chrono::microseconds busy() const override { return busy_; }

  void Abort(const absl::Status& reason) override { group_->Abort(reason); }

 private:
  struct Buffer {
    NcclMemory memory;
    Event released;                 // recorded in the ops' stream
    cudaEvent_t arrived = nullptr;  // the end of the span that filled it
  };
  // One gather.
  struct Span {
    Event begin, end;
  };

  absl::Status Enter() const { return Checked(cudaSetDevice(group_->device()), "device"); }

  // Makes room for one more gather; spans are reused after Finish.
  absl::Status NextSpan() {
    if (num_spans_ == spans_.size()) {
      Span span;
      ISOBIT_RETURN_IF_ERROR(span.begin.Create(cudaEventDefault));
      ISOBIT_RETURN_IF_ERROR(span.end.Create(cudaEventDefault));
      spans_.push_back(std::move(span));
    }
    ++num_spans_;
    return absl::OkStatus();
  }

  const std::unique_ptr<NcclGroup> group_;
  const cudaStream_t ops_;
  const std::chrono::milliseconds timeout_;
  cudaStream_t stream_ = nullptr;
  Buffer buffers_[kBuffers];
  std::vector<Span> spans_;
  size_t num_spans_ = 0;  // of them in use since Finish
  std::chrono::microseconds busy_{0};
};

}  // namespace

absl::StatusOr<std::unique_ptr<BlockGather>> MakeNcclBlockGather(
    std::unique_ptr<NcclGroup> group, size_t block_bytes, CUstream_st* ops,
    std::chrono::milliseconds timeout) {
  auto gather = std::make_unique<NcclBlockGather>(std::move(group), ops, timeout);
  ISOBIT_RETURN_IF_ERROR(gather->Init(block_bytes));
  return gather;
}

}  // namespace isobit
