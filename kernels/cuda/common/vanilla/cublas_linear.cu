// The call of cuBLAS, and the kernel that adds the bias.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/round_up.h"
#include "common/cuda/cuda_status.h"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/ops.h"
#include "kernels/cuda/common/rows/rows.h"
#include "kernels/cuda/common/vanilla/cublas_linear.h"
#include "kernels/ops/linear.h"
#include "kernels/ops/swiglu.h"

namespace isobit::cuda {
namespace {

constexpr size_t kWorkspaceBytes = size_t{64} << 20;
constexpr int kBiasThreads = 256;

absl::Status CublasStatus(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  const std::string message = absl::StrCat(what, ": ", cublasGetStatusName(status));
  if (status == CUBLAS_STATUS_ALLOC_FAILED) return absl::ResourceExhaustedError(message);
  return absl::InternalError(message);
}

#define ISOBIT_RETURN_IF_CUBLAS_ERROR(call)                                             \
  do {                                                                                  \
    if (absl::Status status = CublasStatus((call), #call); !status.ok()) return status; \
  } while (false)

__device__ float Load(Bf16 x) { return contract::Bf16ToFloat(x); }
__device__ float Load(float x) { return x; }
__device__ void Store(float x, Bf16* to) { *to = contract::FloatToBf16(x); }
__device__ void Store(float x, float* to) { *to = x; }

// y[m, n] += bias[n], one row of blocks for each row.
template <typename T>
__global__ void AddBias(T* y, int64_t ldy, int64_t n, const float* bias) {
  ReleaseSuccessor();
  WaitForPredecessor();
  const int64_t column = int64_t{blockIdx.y} * kBiasThreads + threadIdx.x;
  if (column >= n) return;
  T* element = y + blockIdx.x * ldy + column;
  Store(Load(*element) + bias[column], element);
}

template <typename T>
absl::Status LaunchAddBias(const LinearArgs& args, T* y, int64_t ldy, const Stream& stream) {
  if (args.bias == nullptr) return absl::OkStatus();
  const int64_t n = args.weight.shape.n;
  const Grid grid{.blocks = dim3(static_cast<unsigned>(args.m),
                                 static_cast<unsigned>(CeilDiv(n, kBiasThreads))),
                  .threads = dim3(kBiasThreads)};
  return Launch(AddBias<T>, grid, stream, y, ldy, n, args.bias);
}

}  // namespace

absl::StatusOr<std::unique_ptr<CublasLinear>> CublasLinear::Create(int device) {
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaSetDevice(device));
  std::unique_ptr<CublasLinear> linear(new CublasLinear);
  ISOBIT_RETURN_IF_CUBLAS_ERROR(cublasCreate(&linear->handle_));
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaMalloc(&linear->workspace_, kWorkspaceBytes));
  return linear;
}

CublasLinear::~CublasLinear() {
  if (handle_ != nullptr) cublasDestroy(handle_);
  cudaFree(workspace_);
}

absl::Status CublasLinear::Run(const LinearArgs& args, Bf16* gate_up, const Stream& stream) {
  const LinearShape& shape = args.weight.shape;
  if (args.m == 0 || shape.n == 0) return absl::OkStatus();
  if (args.fp32_out != nullptr) {
    if (absl::Status status = Multiply(args, args.fp32_out, CUDA_R_32F, args.ldy, stream);
        !status.ok())
      return status;
    return LaunchAddBias(args, args.fp32_out, args.ldy, stream);
  }
  const bool gated = args.swiglu_out != nullptr;
  if (gated && (gate_up == nullptr || args.ldy != shape.n / 2)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "vanilla SwiGLU of [", args.m, ", ", shape.n, "]: expected scratch and leading dimension ",
        shape.n / 2, ", got ", gate_up == nullptr ? "none" : "some", " and ", args.ldy));
  }
  Bf16* y = gated ? gate_up : args.bf16_out;
  const int64_t ldy = gated ? shape.n : args.ldy;
  if (absl::Status status = Multiply(args, y, CUDA_R_16BF, ldy, stream); !status.ok())
    return status;
  if (absl::Status status = LaunchAddBias(args, y, ldy, stream); !status.ok()) return status;
  if (!gated) return absl::OkStatus();
  return cuda::Run(
      SwiGluArgs{
          .gate_up = gate_up, .out = args.swiglu_out, .rows = args.m, .columns = shape.n / 2},
      stream);
}

// y = x W^T: for column-major cuBLAS, y^T [n, m] = (W^T)^T x^T.
absl::Status CublasLinear::Multiply(const LinearArgs& args, void* y, cudaDataType type, int64_t ldy,
                                    const Stream& stream) {
  const LinearShape& shape = args.weight.shape;
  const float one = 1.0f;
  const float zero = 0.0f;
  ISOBIT_RETURN_IF_CUBLAS_ERROR(cublasSetStream(handle_, stream.handle));
  ISOBIT_RETURN_IF_CUBLAS_ERROR(
      cublasSetWorkspace(handle_, workspace_, kWorkspaceBytes));  // cublasSetStream drops it
  ISOBIT_RETURN_IF_CUBLAS_ERROR(cublasGemmEx_64(handle_, CUBLAS_OP_T, CUBLAS_OP_N, shape.n, args.m,
                                                shape.k, &one, args.weight.packed, CUDA_R_16BF,
                                                std::max<int64_t>(1, shape.k), args.x, CUDA_R_16BF,
                                                std::max<int64_t>(1, args.ldx), &zero, y, type, ldy,
                                                CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
  return absl::OkStatus();
}

std::string CublasLinear::version() const {
  int version = 0;
  cublasGetVersion(handle_, &version);
  return absl::StrCat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

}  // namespace isobit::cuda
