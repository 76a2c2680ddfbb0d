// cuBLAS's matrix products for training, as PyTorch calls them: the baseline for isobit's speed.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_VANILLA_CUBLAS_PRODUCTS_H_
#define ISOBIT_KERNELS_CUDA_COMMON_VANILLA_CUBLAS_PRODUCTS_H_

#include <cublas_v2.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/contract/portable.h"

namespace isobit::cuda {

// y = x W^T, dX = dY W, dW = dY^T X.
enum class Product { kForward, kInputGradient, kWeightGradient };

// For a layer with weight [n, columns] and `rows` rows; all matrices are row-major without gaps.
struct CublasProduct {
  Product product = Product::kForward;
  int64_t rows = 0;
  int64_t n = 0;
  int64_t columns = 0;
  const contract::Bf16* x = nullptr;
  const contract::Bf16* weight = nullptr;
  const contract::Bf16* dy = nullptr;
  void* out = nullptr;
  bool fp32_out = false;  // otherwise bf16
};

// Default heuristics, fp32 accumulation, a workspace of 64 MB.
class CublasProducts {
 public:
  // RESOURCE_EXHAUSTED: there is no memory. INTERNAL: cuBLAS failed.
  static absl::StatusOr<std::unique_ptr<CublasProducts>> Create();
  CublasProducts(const CublasProducts&) = delete;
  CublasProducts& operator=(const CublasProducts&) = delete;
  ~CublasProducts();

  // May be captured into a graph. INTERNAL: cuBLAS failed.
  absl::Status Run(const CublasProduct& p, cudaStream_t stream);

 private:
  CublasProducts() = default;

  cublasHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
};

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_VANILLA_CUBLAS_PRODUCTS_H_
