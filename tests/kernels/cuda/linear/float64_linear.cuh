// x W^T in float64 on the GPU, and how far a result is from it.
#ifndef ISOBIT_TESTS_KERNELS_CUDA_LINEAR_FLOAT64_LINEAR_CUH_
#define ISOBIT_TESTS_KERNELS_CUDA_LINEAR_FLOAT64_LINEAR_CUH_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/contract/portable.h"
#include "tests/kernels/cuda/device_case.h"

namespace isobit::testing_support {

inline __global__ void Float64LinearKernel(const Bf16* x, int64_t ldx, const Bf16* w, int64_t n,
                                           int64_t k, double* y) {
  const int64_t column = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  if (column >= n) return;
  double sum = 0;
  for (int64_t i = 0; i < k; ++i) {
    sum += static_cast<double>(contract::Bf16ToFloat(x[blockIdx.x * ldx + i])) *
           static_cast<double>(contract::Bf16ToFloat(w[column * k + i]));
  }
  y[blockIdx.x * n + column] = sum;
}

// [m, n] of device operands x [m, k] (leading dimension ldx) and w [n, k].
inline std::vector<double> Float64Linear(const Bf16* x, int64_t ldx, int64_t m, const Bf16* w,
                                         int64_t n, int64_t k) {
  DeviceBuffer<double> y(m * n);
  Float64LinearKernel<<<dim3(static_cast<unsigned>(m), static_cast<unsigned>((n + 127) / 128)),
                        128>>>(x, ldx, w, n, k, y.data());
  ISOBIT_CHECK_CUDA(cudaGetLastError());
  return y.CopyOut();
}

// Root mean square and maximum of |value - exact|, in units of the root mean square of the exact.
struct Deviation {
  double rms = 0;
  double max = 0;
};
template <typename Value>
Deviation DeviationOf(const std::vector<double>& exact, const Value& value) {
  double sum = 0;
  double norm = 0;
  Deviation deviation;
  for (size_t i = 0; i < exact.size(); ++i) {
    const double difference = std::abs(value(i) - exact[i]);
    sum += difference * difference;
    norm += exact[i] * exact[i];
    deviation.max = std::max(deviation.max, difference);
  }
  deviation.rms = std::sqrt(sum / norm);
  deviation.max /= std::sqrt(norm / static_cast<double>(exact.size()));
  return deviation;
}

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_KERNELS_CUDA_LINEAR_FLOAT64_LINEAR_CUH_
