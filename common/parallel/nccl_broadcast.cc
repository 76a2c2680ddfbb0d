// The communicator, the GPU buffer that a broadcast fills, and the copy to the host.
#include "common/parallel/nccl_broadcast.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"
#include "common/parallel/nccl_status.h"
#include "common/parallel/pickled_nccl_id.h"

namespace isobit {
namespace {

using Clock = std::chrono::steady_clock;
using cuda::CudaStatus;

constexpr std::chrono::microseconds kPollInterval(50);

// What a rank has on its GPU. It may have to outlive the rank: NCCL's kernels use it until
// ncclCommAbort returns, which may wait for copies that never end.
struct Resources {
  int device = 0;
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;
  void* buffer = nullptr;

  // Nobody could handle an error.
  void Free() {
    if (cudaSetDevice(device) != cudaSuccess) return;
    if (comm != nullptr) static_cast<void>(ncclCommAbort(comm));
    cudaFree(buffer);
    if (event != nullptr) cudaEventDestroy(event);
    if (stream != nullptr) cudaStreamDestroy(stream);
  }
};

class NcclBroadcast final : public WeightBroadcast {
 public:
  explicit NcclBroadcast(int device) { on_gpu_.device = device; }
  ~NcclBroadcast() override {
    // Nothing that waits for the sender may hold up its caller.
    std::thread([on_gpu = on_gpu_]() mutable { on_gpu.Free(); }).detach();
  }

  absl::Status Join(const BroadcastGroup& group, const PeerWait& wait) {
    SetNcclEnvironment();
    ncclUniqueId id;
    static_assert(sizeof(id.internal) == kNcclIdBytes);
    if (group.id.size() != kNcclIdBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("an NCCL id of ", group.id.size(), " bytes, expected ", kNcclIdBytes));
    }
    std::memcpy(id.internal, group.id.data(), kNcclIdBytes);
    ISOBIT_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(on_gpu_.device), "cudaSetDevice"));
    ISOBIT_RETURN_IF_ERROR(
        CudaStatus(cudaStreamCreateWithFlags(&on_gpu_.stream, cudaStreamNonBlocking), "stream"));
    ISOBIT_RETURN_IF_ERROR(CudaStatus(
        cudaEventCreateWithFlags(&on_gpu_.event, cudaEventDisableTiming), "cudaEventCreate"));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const char* const what = "the trainer's NCCL group";
    ISOBIT_RETURN_IF_ERROR(NcclStatus(
        ncclCommInitRankConfig(&on_gpu_.comm, group.size, id, group.rank, &config), what, nullptr));
    const auto check = [&] { return wait.Check(what); };
    ISOBIT_RETURN_IF_ERROR(WaitForCall(what, check));
    return SumOfOne(what, check);
  }

  absl::Status Reserve(size_t bytes) override {
    if (bytes != 0 && bytes <= reserved_) return absl::OkStatus();
    ISOBIT_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(on_gpu_.device), "cudaSetDevice"));
    cudaFree(std::exchange(on_gpu_.buffer, nullptr));
    reserved_ = 0;
    if (bytes == 0) return absl::OkStatus();
    if (cudaMalloc(&on_gpu_.buffer, bytes) != cudaSuccess) {
      cudaGetLastError();  // clears it: otherwise a later launch would report it
      on_gpu_.buffer = nullptr;
      return absl::ResourceExhaustedError(
          absl::StrCat("CUDA device ", on_gpu_.device, ": no memory for a broadcast of ", bytes,
                       " bytes; a smaller packed_buffer_size_bytes takes less"));
    }
    reserved_ = bytes;
    return absl::OkStatus();
  }

  absl::Status Begin(size_t bytes, std::chrono::milliseconds max_silence,
                     const std::function<absl::Status()>& check) override {
    const char* const what = "broadcast of weights";
    const Clock::time_point deadline = Clock::now() + max_silence;
    const auto check_all = [&]() -> absl::Status {
      ISOBIT_RETURN_IF_ERROR(check());
      if (Clock::now() < deadline) return absl::OkStatus();
      return absl::DeadlineExceededError(
          absl::StrCat(what, ": the trainer has been silent for ", max_silence.count(), " ms"));
    };
    ISOBIT_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(on_gpu_.device), "cudaSetDevice"));
    next_ = 0;
    ISOBIT_RETURN_IF_ERROR(
        NcclStatus(ncclBroadcast(on_gpu_.buffer, on_gpu_.buffer, bytes, ncclUint8, /*root=*/0,
                                 on_gpu_.comm, on_gpu_.stream),
                   what, on_gpu_.comm));
    return WaitForStream(what, check_all);
  }

  absl::Status Read(void* out, size_t bytes) override {
    const auto* const from = static_cast<const std::byte*>(on_gpu_.buffer) + next_;
    ISOBIT_RETURN_IF_ERROR(CudaStatus(
        cudaMemcpyAsync(out, from, bytes, cudaMemcpyDeviceToHost, on_gpu_.stream), "cudaMemcpy"));
    ISOBIT_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(on_gpu_.stream), "cudaMemcpy"));
    next_ += bytes;
    return absl::OkStatus();
  }

 private:
  template <typename Check>
  absl::Status SumOfOne(const char* what, const Check& check) {
    ISOBIT_RETURN_IF_ERROR(CudaStatus(cudaMalloc(&on_gpu_.buffer, sizeof(float)), "cudaMalloc"));
    ISOBIT_RETURN_IF_ERROR(CudaStatus(
        cudaMemsetAsync(on_gpu_.buffer, 0, sizeof(float), on_gpu_.stream), "cudaMemset"));
    ISOBIT_RETURN_IF_ERROR(NcclStatus(ncclAllReduce(on_gpu_.buffer, on_gpu_.buffer, 1, ncclFloat,
                                                    ncclSum, on_gpu_.comm, on_gpu_.stream),
                                      what, on_gpu_.comm));
    return WaitForStream(what, check);
  }

  // Waits until NCCL has taken the last call.
  template <typename Check>
  absl::Status WaitForCall(const char* what, const Check& check) {
    while (true) {
      ISOBIT_RETURN_IF_ERROR(check());
      ncclResult_t result = ncclSuccess;
      ISOBIT_RETURN_IF_ERROR(
          NcclStatus(ncclCommGetAsyncError(on_gpu_.comm, &result), what, on_gpu_.comm));
      if (result == ncclInvalidUsage) {
        return absl::InvalidArgumentError(
            absl::StrCat(NcclStatus(result, what, on_gpu_.comm).message(),
                         "; the trainer's rank 0 needs a GPU of its own"));
      }
      ISOBIT_RETURN_IF_ERROR(NcclStatus(result, what, on_gpu_.comm));
      if (result == ncclSuccess) return absl::OkStatus();
      std::this_thread::sleep_for(kPollInterval);
    }
  }

  // Waits until all that is on the stream has ended.
  template <typename Check>
  absl::Status WaitForStream(const char* what, const Check& check) {
    ISOBIT_RETURN_IF_ERROR(WaitForCall(what, check));
    ISOBIT_RETURN_IF_ERROR(
        CudaStatus(cudaEventRecord(on_gpu_.event, on_gpu_.stream), "cudaEventRecord"));
    while (true) {
      const cudaError_t state = cudaEventQuery(on_gpu_.event);
      if (state == cudaSuccess) return WaitForCall(what, check);
      if (state != cudaErrorNotReady) return CudaStatus(state, what);
      ISOBIT_RETURN_IF_ERROR(WaitForCall(what, check));
      std::this_thread::sleep_for(kPollInterval);
    }
  }

  Resources on_gpu_;
  size_t reserved_ = 0;
  size_t next_ = 0;  // byte of the broadcast
};

}  // namespace

JoinWeightBroadcast NcclBroadcastOn(int device) {
  return [device](const BroadcastGroup& group,
                  const PeerWait& wait) -> absl::StatusOr<std::unique_ptr<WeightBroadcast>> {
    auto broadcast = std::make_unique<NcclBroadcast>(device);
    ISOBIT_RETURN_IF_ERROR(broadcast->Join(group, wait));
    return broadcast;
  };
}

}  // namespace isobit
