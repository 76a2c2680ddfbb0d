// The call of cuBLAS for each product.
#include "kernels/cuda/common/vanilla/cublas_products.h"

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"

namespace isobit::cuda {
namespace {

constexpr size_t kWorkspaceBytes = size_t{64} << 20;

absl::Status CublasStatus(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, ": ", cublasGetStatusName(status)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<CublasProducts>> CublasProducts::Create() {
  std::unique_ptr<CublasProducts> products(new CublasProducts);
  ISOBIT_RETURN_IF_ERROR(CublasStatus(cublasCreate(&products->handle_), "cublasCreate"));
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaMalloc(&products->workspace_, kWorkspaceBytes));
  return products;
}

CublasProducts::~CublasProducts() {
  if (handle_ != nullptr) cublasDestroy(handle_);
  cudaFree(workspace_);
}

// cuBLAS's matrices are column-major: it sees each of ours transposed, and computes the transposed
// result [m, n] = a [m, k] b [k, n].
absl::Status CublasProducts::Run(const CublasProduct& p, cudaStream_t stream) {
  struct Operands {
    cublasOperation_t op_a, op_b;
    int64_t m, n, k;
    const void* a;
    int64_t lda;
    const void* b;
    int64_t ldb;
  };
  const auto operands = [&]() -> Operands {
    switch (p.product) {
      case Product::kForward:
        return {CUBLAS_OP_T, CUBLAS_OP_N, p.n, p.rows,   p.columns,
                p.weight,    p.columns,   p.x, p.columns};
      case Product::kInputGradient:
        return {CUBLAS_OP_N, CUBLAS_OP_N, p.columns, p.rows, p.n, p.weight, p.columns, p.dy, p.n};
      case Product::kWeightGradient:
        return {CUBLAS_OP_N, CUBLAS_OP_T, p.columns, p.n, p.rows, p.x, p.columns, p.dy, p.n};
    }
    return {};
  };
  const Operands o = operands();
  const float one = 1.0f;
  const float zero = 0.0f;
  ISOBIT_RETURN_IF_ERROR(CublasStatus(cublasSetStream(handle_, stream), "cublasSetStream"));
  // cublasSetStream drops the workspace.
  ISOBIT_RETURN_IF_ERROR(
      CublasStatus(cublasSetWorkspace(handle_, workspace_, kWorkspaceBytes), "cublasSetWorkspace"));
  return CublasStatus(
      cublasGemmEx_64(handle_, o.op_a, o.op_b, o.m, o.n, o.k, &one, o.a, CUDA_R_16BF, o.lda, o.b,
                      CUDA_R_16BF, o.ldb, &zero, p.out, p.fp32_out ? CUDA_R_32F : CUDA_R_16BF, o.m,
                      CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
      "cublasGemmEx_64");
}

}  // namespace isobit::cuda
