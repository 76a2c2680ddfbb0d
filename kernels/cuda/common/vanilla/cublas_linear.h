// The linear layer of mode vanilla on the GPU: cuBLAS, called as ordinary engines do. Also the
// baseline for speed and accuracy of isobit's own linear layer.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_VANILLA_CUBLAS_LINEAR_H_
#define ISOBIT_KERNELS_CUDA_COMMON_VANILLA_CUBLAS_LINEAR_H_

#include <cublas_v2.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/contract/portable.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/ops/linear.h"

namespace isobit::cuda {

// cuBLAS on one device and one thread: default heuristics, fp32 accumulation, a workspace of 64 MB
// of its own. Its bits may change with the shape, the library's version and the device.
class CublasLinear {
 public:
  // RESOURCE_EXHAUSTED: no memory. FAILED_PRECONDITION: no usable device. INTERNAL: cuBLAS failed.
  static absl::StatusOr<std::unique_ptr<CublasLinear>> Create(int device);
  CublasLinear(const CublasLinear&) = delete;
  CublasLinear& operator=(const CublasLinear&) = delete;
  ~CublasLinear();

  // args.weight.packed is row-major without gaps (PlainWeightPacker); a gated weight has its gates
  // first, then its ups. The leaves are ignored. gate_up: scratch of [m, n] for a call with
  // swiglu_out, whose ldy must be n / 2. May be captured into a graph. INVALID_ARGUMENT: swiglu_out
  // comes without scratch or with another ldy. INTERNAL: cuBLAS or CUDA failed.
  absl::Status Run(const LinearArgs& args, Bf16* gate_up, const Stream& stream);

  // The version of cuBLAS, such as "13.1.0".
  std::string version() const;

 private:
  CublasLinear() = default;
  absl::Status Multiply(const LinearArgs& args, void* y, cudaDataType type, int64_t ldy,
                        const Stream& stream);

  cublasHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
};

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_VANILLA_CUBLAS_LINEAR_H_
