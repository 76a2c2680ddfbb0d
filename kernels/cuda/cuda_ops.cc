// Joins the ops of this folder into one backend.
#include "kernels/cuda/cuda_ops.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"
#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/device/device_info.h"
#include "kernels/cuda/linear/layout.h"
#include "kernels/cuda/linear/linear.h"
#include "kernels/cuda/log_prob_stage.h"
#include "kernels/cuda/rows/rows.h"
#include "kernels/cuda/vanilla/cublas_linear.h"

namespace isobit {
namespace {

using cuda::CudaStatus;

using ByteCount = std::shared_ptr<std::atomic<size_t>>;  // memory may outlive the ops

// Memory of the present device, counted in `allocated` while it lasts. Freeing waits for the
// device, so no op can still be using it.
absl::StatusOr<Memory> AllocateDevice(size_t bytes, const ByteCount& allocated) {
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, std::max<size_t>(bytes, 1));
  if (error != cudaSuccess) {
    cudaGetLastError();  // it stays set, and would be taken for a later launch's
    return CudaStatus(error, absl::StrCat("cudaMalloc of ", bytes, " bytes"));
  }
  *allocated += bytes;
  return Memory(static_cast<std::byte*>(memory), [allocated, bytes](std::byte* p) {
    cudaFree(p);
    *allocated -= bytes;
  });
}

// Memory that AllocateBeside leaves for scratch of the ops that has yet to grow.
constexpr size_t kSpareBytes = size_t{1} << 30;

// Of AllocateBeside and Upload; the memory keeps it alive.
struct SideStream {
  SideStream() = default;
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;
  ~SideStream() {
    if (handle != nullptr) cudaStreamDestroy(handle);
  }
  cudaStream_t handle = nullptr;
};

class StreamOps final : public CudaOps {
 public:
  static absl::StatusOr<std::unique_ptr<CudaOps>> Create(const CudaOptions& options) {
    ISOBIT_ASSIGN_OR_RETURN(const cuda::DeviceInfo info, cuda::GetDeviceInfo(options.device));
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaSetDevice(options.device));
    std::unique_ptr<StreamOps> ops(new StreamOps(options, info));
    ISOBIT_RETURN_IF_CUDA_ERROR(
        cudaStreamCreateWithFlags(&ops->stream_.handle, cudaStreamNonBlocking));
    ISOBIT_RETURN_IF_CUDA_ERROR(
        cudaStreamCreateWithFlags(&ops->side_->handle, cudaStreamNonBlocking));
    if (options.mode == NumericsMode::kVanilla) {
      ISOBIT_ASSIGN_OR_RETURN(ops->cublas_, cuda::CublasLinear::Create(options.device));
    }
    return ops;
  }
  ~StreamOps() override {
    if (stream_.handle != nullptr) cudaStreamDestroy(stream_.handle);
  }

  const char* name() const override { return name_.c_str(); }
  const cuda::Stream& stream() const override { return stream_; }
  size_t allocated_bytes() const override { return *allocated_; }

  absl::StatusOr<Memory> Allocate(size_t bytes) override {
    ISOBIT_RETURN_IF_ERROR(Enter());
    return AllocateDevice(bytes, allocated_);
  }

  absl::StatusOr<std::shared_ptr<const std::byte>> Share(std::shared_ptr<const std::byte> host,
                                                         size_t bytes) override {
    ISOBIT_ASSIGN_OR_RETURN(Memory memory, Allocate(bytes));
    ISOBIT_RETURN_IF_ERROR(Copy(memory.get(), host.get(), bytes));
    ISOBIT_RETURN_IF_ERROR(Synchronize());
    std::byte* const copy = memory.get();
    return std::shared_ptr<const std::byte>(std::make_shared<Memory>(std::move(memory)), copy);
  }

  // From the device's pool, in the order of the side stream: cudaMalloc and cudaFree wait for
  // kernels, also for those that wait for a peer which the caller holds up.
  absl::StatusOr<Memory> AllocateBeside(size_t bytes) override {
    ISOBIT_RETURN_IF_ERROR(Enter());
    size_t free = 0;
    size_t total = 0;
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaMemGetInfo(&free, &total));
    if (free < kSpareBytes || free - kSpareBytes < bytes) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "no room for ", bytes, " bytes beside ", kSpareBytes, " to spare: ", free, " are free"));
    }
    void* memory = nullptr;
    const cudaError_t error = cudaMallocAsync(&memory, std::max<size_t>(bytes, 1), side_->handle);
    if (error != cudaSuccess) {
      return CudaStatus(error, absl::StrCat("cudaMallocAsync of ", bytes, " bytes"));
    }
    return Memory(static_cast<std::byte*>(memory), [side = side_](std::byte* p) {
      cudaFreeAsync(p, side->handle);
      cudaStreamSynchronize(side->handle);  // then the pool gives back to the device
    });
  }

  absl::Status Upload(void* to, const void* from, size_t bytes) override {
    ISOBIT_RETURN_IF_ERROR(Enter());
    ISOBIT_RETURN_IF_CUDA_ERROR(
        cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, side_->handle));
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(side_->handle));
    return absl::OkStatus();
  }

  absl::Status Copy(void* to, const void* from, size_t bytes) override {
    ISOBIT_RETURN_IF_ERROR(Enter());
    ISOBIT_RETURN_IF_CUDA_ERROR(
        cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_.handle));
    return absl::OkStatus();
  }

  absl::Status Synchronize() override {
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream_.handle));
    return absl::OkStatus();
  }

  absl::StatusOr<StagedStep> Stage(absl::Span<const int32_t> ids,
                                   absl::Span<const SequenceRows> sequences,
                                   int32_t page_size) override {
    return StageWithin(ids, sequences, page_size, {});
  }

  absl::StatusOr<StagedStep> StageWithin(absl::Span<const int32_t> ids,
                                         absl::Span<const SequenceRows> sequences,
                                         int32_t page_size,
                                         const cuda::StepBounds& bounds) override {
    ISOBIT_RETURN_IF_ERROR(Enter());
    ISOBIT_RETURN_IF_ERROR(stage_.Stage(ids, sequences, page_size, bounds, stream_.handle));
    return StagedStep{stage_.ids(), {sequences, &stage_.device()}};
  }

  absl::StatusOr<SequenceTable> StageHalf(int half, absl::Span<const SequenceRows> sequences,
                                          int32_t page_size) override {
    ISOBIT_RETURN_IF_ERROR(Enter());
    cuda::SequenceStage& stage = half_stages_[half];
    ISOBIT_RETURN_IF_ERROR(
        stage.Stage({}, sequences, page_size, {.part_of_step = true}, stream_.handle));
    return SequenceTable{sequences, &stage.device()};
  }

  absl::Status ReserveStage(int64_t rows, int64_t sequences, int64_t pages) override {
    ISOBIT_RETURN_IF_ERROR(Enter());
    for (cuda::SequenceStage& stage : half_stages_) {
      ISOBIT_RETURN_IF_ERROR(stage.Reserve(rows, sequences, pages));
    }
    return stage_.Reserve(rows, sequences, pages);
  }

  size_t PackedBytes(const LinearShape& shape) const override {
    return cublas_ != nullptr ? cuda::PlainLinearBytes(shape) : cuda::PackedLinearBytes(shape);
  }

  void Pack(const LinearShape& shape, const Bf16* w, int64_t ldw,
            std::byte* packed) const override {
    (cublas_ != nullptr ? cuda::PackPlainLinear : cuda::PackLinear)(shape, w, ldw, packed);
  }

  absl::Status Linear(const LinearArgs& args) override {
    ISOBIT_RETURN_IF_ERROR(Enter());
    if (cublas_ == nullptr) return cuda::LaunchLinear(args, stream_);
    if (args.swiglu_out != nullptr) {
      const size_t elements = static_cast<size_t>(args.m * args.weight.shape.n);
      ISOBIT_RETURN_IF_ERROR(Reserve(gate_up_, elements * sizeof(Bf16)));
    }
    return cublas_->Run(args, reinterpret_cast<Bf16*>(gate_up_.memory.get()), stream_);
  }

  absl::Status Embedding(const EmbeddingArgs& args) override {
    ISOBIT_RETURN_IF_ERROR(Enter());
    return cuda::LaunchEmbedding(args, stream_);
  }

  absl::Status RmsNorm(const RmsNormArgs& args) override {
    ISOBIT_RETURN_IF_ERROR(Enter());
    return cuda::LaunchRmsNorm(args, stream_);
  }

  absl::Status SwiGlu(const SwiGluArgs& args) override {
    ISOBIT_RETURN_IF_ERROR(Enter());
    return cuda::LaunchSwiGlu(args, stream_);
  }

  absl::Status Qkv(const QkvArgs& args) override {
    ISOBIT_RETURN_IF_ERROR(Enter());
    return cuda::LaunchQkv(args, stream_);
  }

  absl::Status Attention(const AttentionArgs& args) override {
    ISOBIT_RETURN_IF_ERROR(Enter());
    const size_t bytes = cuda::AttentionWorkspaceBytes(args);
    ISOBIT_RETURN_IF_ERROR(Reserve(attention_, bytes));
    return cuda::LaunchAttention(args, {attention_.memory.get(), attention_.bytes}, stream_);
  }

  absl::Status Reduce(const ReduceArgs& args) override {
    ISOBIT_RETURN_IF_ERROR(Enter());
    return cuda::LaunchReduce(args, stream_);
  }

  absl::Status LogProbs(const LogProbArgs& args) override {
    ISOBIT_RETURN_IF_ERROR(Enter());
    return log_probs_.Run(args, stream_);
  }

 private:
  struct Scratch {
    Memory memory;
    size_t bytes = 0;
  };

  StreamOps(const CudaOptions& options, const cuda::DeviceInfo& info)
      : device_(options.device), name_(absl::StrCat("cuda/", info.name)) {}

  // The calling thread's device is this object's from here on.
  absl::Status Enter() const {
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaSetDevice(device_));
    return absl::OkStatus();
  }

  absl::Status Reserve(Scratch& scratch, size_t bytes) {
    if (bytes <= scratch.bytes) return absl::OkStatus();
    if (scratch.memory != nullptr) outgrown_.push_back(std::move(scratch.memory));
    scratch.bytes = std::max(bytes, 2 * scratch.bytes);  // so that the outgrown are less than it
    absl::StatusOr<Memory> memory = AllocateDevice(scratch.bytes, allocated_);
    if (!memory.ok()) scratch.bytes = 0;
    ISOBIT_ASSIGN_OR_RETURN(scratch.memory, std::move(memory));
    return absl::OkStatus();
  }

  const int device_;
  const std::string name_;
  const ByteCount allocated_ = std::make_shared<std::atomic<size_t>>(0);
  cuda::Stream stream_;
  const std::shared_ptr<SideStream> side_ = std::make_shared<SideStream>();
  cuda::SequenceStage stage_;
  cuda::SequenceStage half_stages_[2];
  cuda::LogProbStage log_probs_;
  std::unique_ptr<cuda::CublasLinear> cublas_;  // mode vanilla alone
  Scratch attention_;
  Scratch gate_up_;  // of cuBLAS, before SwiGLU
  std::vector<Memory> outgrown_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CudaOps>> MakeCudaOps(const CudaOptions& options) {
  return StreamOps::Create(options);
}

}  // namespace isobit
