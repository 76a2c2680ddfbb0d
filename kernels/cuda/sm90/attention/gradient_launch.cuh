// Launches the kernels of attention's gradient for one head size.
#ifndef ISOBIT_KERNELS_CUDA_SM90_ATTENTION_GRADIENT_LAUNCH_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_ATTENTION_GRADIENT_LAUNCH_CUH_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/cuda/sm90/attention/gradient.h"
#include "kernels/cuda/sm90/attention/gradient_keys.cuh"
#include "kernels/cuda/sm90/attention/gradient_queries.cuh"
#include "kernels/cuda/sm90/attention/gradient_stored.cuh"
#include "kernels/ops/attention.h"

namespace isobit::cuda {

template <int kHeadDim>
absl::Status LaunchKeyGradient(const GradientParams& params, const PassSequences& sequences,
                               const Stream& stream) {
  using Shape = KeyGradientShape<kHeadDim>;
  const int64_t blocks = CountTiles(sequences, Shape::kKeys) * params.launch_kv_heads;
  return Launch(KeyGradientKernel<kHeadDim>,
                {.blocks = dim3(static_cast<unsigned>(blocks)),
                 .threads = dim3(Shape::kThreads),
                 .shared_bytes = Shape::kSharedBytes},
                stream, params);
}

template <class Shape>
absl::Status LaunchForQueries(void (*kernel)(GradientParams), const GradientParams& params,
                              const PassSequences& sequences, const Stream& stream) {
  const int64_t heads = int64_t{params.launch_kv_heads} * params.heads_per_kv;
  const int64_t blocks = CountTiles(sequences, Shape::kQueries) * heads;
  return Launch(kernel,
                {.blocks = dim3(static_cast<unsigned>(blocks)),
                 .threads = dim3(Shape::kThreads),
                 .shared_bytes = Shape::kSharedBytes},
                stream, params);
}

template <int kHeadDim>
absl::Status LaunchQueryGradient(const GradientParams& params, const PassSequences& sequences,
                                 const Stream& stream) {
  if (params.score_gradients == nullptr) {
    return LaunchForQueries<QueryGradientShape<kHeadDim>>(QueryGradientKernel<kHeadDim>, params,
                                                          sequences, stream);
  }
  return LaunchForQueries<StoredGradientShape<kHeadDim>>(StoredGradientKernel<kHeadDim>, params,
                                                         sequences, stream);
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_ATTENTION_GRADIENT_LAUNCH_CUH_
