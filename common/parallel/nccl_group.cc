// The communicator is a blocking one, because NCCL starts a thread for every call on a non-blocking
// one. So that a missing rank cannot block the others for ever, calls that wait for other ranks run
// on a separate thread, which the caller abandons at the deadline. See nccl_group.h.
#include "common/parallel/nccl_group.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstring>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"
#include "common/parallel/nccl_status.h"

namespace isobit {
namespace {

using cuda::CudaStatus;

constexpr std::chrono::seconds kDestroyTimeout(5);

// Runs `work` for at most `timeout`. `work` must own everything that it uses, as it may outlive the
// call.
absl::Status RunBounded(const std::string& what, std::chrono::milliseconds timeout,
                        std::function<absl::Status()> work) {
  auto task = std::make_shared<std::packaged_task<absl::Status()>>(std::move(work));
  std::future<absl::Status> status = task->get_future();
  std::thread([task] { (*task)(); }).detach();
  if (status.wait_for(timeout) == std::future_status::ready) return status.get();
  return absl::DeadlineExceededError(
      absl::StrCat(what, ": not all ranks came within ", timeout.count(), " ms"));
}

// NCCL connects ranks at their first collective, which waits for all of them. So that the wait has
// a timeout, the first ones of each kind are made when the group is.
absl::Status Connect(const NcclOptions& options, ncclComm_t comm, const std::string& what) {
  void* bytes = nullptr;
  ISOBIT_RETURN_IF_ERROR(
      CudaStatus(cudaMalloc(&bytes, static_cast<size_t>(options.size)), "cudaMalloc"));
  ncclResult_t result = ncclAllGather(static_cast<std::byte*>(bytes) + options.rank, bytes, 1,
                                      ncclUint8, comm, cudaStreamPerThread);
  if (result == ncclSuccess) {
    result = ncclAllReduce(bytes, bytes, 1, ncclUint8, ncclSum, comm, cudaStreamPerThread);
  }
  const cudaError_t ended = cudaStreamSynchronize(cudaStreamPerThread);
  cudaFree(bytes);
  ISOBIT_RETURN_IF_ERROR(NcclStatus(result, what.c_str(), comm));
  return CudaStatus(ended, what);
}

}  // namespace

struct NcclGroup::Shared {
  std::mutex mutex;  // guards what follows; nobody waits for other ranks while holding it
  ncclComm_t comm = nullptr;
  absl::Status failure;  // set: comm is null
};

absl::StatusOr<std::string> NewNcclId() {
  SetNcclEnvironment();
  ncclUniqueId id;
  ISOBIT_RETURN_IF_ERROR(NcclStatus(ncclGetUniqueId(&id), "ncclGetUniqueId", nullptr));
  return std::string(id.internal, sizeof(id.internal));
}

absl::StatusOr<std::unique_ptr<NcclGroup>> NcclGroup::Create(const NcclOptions& options) {
  SetNcclEnvironment();
  ncclUniqueId id;
  ISOBIT_CHECK(options.id.size() == sizeof(id.internal)) << options.id.size() << " bytes of id";
  std::memcpy(id.internal, options.id.data(), sizeof(id.internal));
  auto shared = std::make_shared<Shared>();
  const std::string what = absl::StrCat("NCCL group of ", options.size, ", rank ", options.rank);
  ISOBIT_RETURN_IF_ERROR(RunBounded(what, options.timeout, [=]() -> absl::Status {
    ISOBIT_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(options.device), "cudaSetDevice"));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    // Copy engines instead of multiprocessors, where memory and GPUs allow it: a matrix product is
    // spread over all multiprocessors and would wait for those that NCCL holds.
    config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
    ncclComm_t comm = nullptr;
    const ncclResult_t result =
        ncclCommInitRankConfig(&comm, options.size, id, options.rank, &config);
    ISOBIT_RETURN_IF_ERROR(NcclStatus(result, what.c_str(), nullptr));
    ISOBIT_RETURN_IF_ERROR(Connect(options, comm, what));
    const std::lock_guard lock(shared->mutex);
    shared->comm = comm;
    return absl::OkStatus();
  }));
  return std::unique_ptr<NcclGroup>(new NcclGroup(options, std::move(shared)));
}

NcclGroup::~NcclGroup() {
  ncclComm_t comm = nullptr;
  {
    const std::lock_guard lock(shared_->mutex);
    if (!shared_->failure.ok()) return;
    shared_->failure = absl::CancelledError("the NCCL group has ended");
    std::swap(comm, shared_->comm);
  }
  // May wait for a peer that has gone. Nobody could handle an error.
  static_cast<void>(RunBounded("ncclCommDestroy", kDestroyTimeout, [comm, device = device()] {
    ISOBIT_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(device), "cudaSetDevice"));
    return NcclStatus(ncclCommDestroy(comm), "ncclCommDestroy", nullptr);
  }));
}

absl::StatusOr<NcclMemory> NcclGroup::Allocate(size_t bytes) {
  const std::string what = absl::StrCat("NCCL memory of ", bytes, " bytes on rank ", rank());
  auto memory = std::make_shared<NcclMemory>();
  ISOBIT_RETURN_IF_ERROR(RunBounded(
      what, options_.timeout, [=, shared = shared_, options = options_]() -> absl::Status {
        ISOBIT_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(options.device), "cudaSetDevice"));
        ncclComm_t comm = nullptr;
        {
          const std::lock_guard lock(shared->mutex);
          ISOBIT_RETURN_IF_ERROR(shared->failure);
          comm = shared->comm;
        }
        void* address = nullptr;
        if (const ncclResult_t result = ncclMemAlloc(&address, bytes); result != ncclSuccess) {
          const absl::Status status = NcclStatus(result, what.c_str(), nullptr);
          return absl::ResourceExhaustedError(status.message());
        }
        *memory =
            NcclMemory(static_cast<std::byte*>(address), [](std::byte* p) { ncclMemFree(p); });
        // Without peer access there is no window, and NCCL uses kernels instead of copy engines: no
        // error.
        ncclWindow_t window = nullptr;
        ISOBIT_RETURN_IF_ERROR(NcclStatus(
            ncclCommWindowRegister(comm, address, bytes, &window, NCCL_WIN_COLL_SYMMETRIC),
            what.c_str(), comm));
        // The first gather in a window sets up the copy engines, which waits for the other ranks.
        if (bytes < static_cast<size_t>(options.size)) return absl::OkStatus();
        const ncclResult_t gathered = ncclAllGather(memory->get() + options.rank, address, 1,
                                                    ncclUint8, comm, cudaStreamPerThread);
        ISOBIT_RETURN_IF_ERROR(NcclStatus(gathered, what.c_str(), comm));
        return CudaStatus(cudaStreamSynchronize(cudaStreamPerThread), what);
      }));
  return std::move(*memory);
}

absl::Status NcclGroup::AllGather(const void* send, void* receive, size_t bytes,
                                  CUstream_st* stream) {
  return Run("ncclAllGather", [&](ncclComm* comm) {
    return ncclAllGather(send, receive, bytes, ncclUint8, comm, stream);
  });
}

absl::Status NcclGroup::Run(const char* what, absl::FunctionRef<int(ncclComm*)> call) {
  const std::lock_guard lock(shared_->mutex);
  ISOBIT_RETURN_IF_ERROR(shared_->failure);
  return NcclStatus(static_cast<ncclResult_t>(call(shared_->comm)), what, shared_->comm);
}

absl::Status NcclGroup::Check() {
  const std::lock_guard lock(shared_->mutex);
  ISOBIT_RETURN_IF_ERROR(shared_->failure);
  ncclResult_t result = ncclSuccess;
  ISOBIT_RETURN_IF_ERROR(NcclStatus(ncclCommGetAsyncError(shared_->comm, &result),
                                    "ncclCommGetAsyncError", shared_->comm));
  return NcclStatus(result, absl::StrCat("NCCL, rank ", rank()).c_str(), shared_->comm);
}

void NcclGroup::Abort(const absl::Status& reason) {
  ISOBIT_CHECK(!reason.ok());
  ncclComm_t comm = nullptr;
  {
    const std::lock_guard lock(shared_->mutex);
    if (!shared_->failure.ok()) return;
    shared_->failure = reason;
    std::swap(comm, shared_->comm);
  }
  // This may wait for the other ranks of this process, and for copies that never end, so nothing
  // waits for it. Nobody could handle an error.
  std::thread([comm, device = device()] {
    if (cudaSetDevice(device) == cudaSuccess) static_cast<void>(ncclCommAbort(comm));
  }).detach();
}

}  // namespace isobit
