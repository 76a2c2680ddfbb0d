// Attention of training and its gradient for head size 96.
#include "kernels/cuda/sm90/attention/gradient_launch.cuh"
#include "kernels/cuda/sm90/attention/prefill.cuh"
#include "kernels/ops/attention.h"

namespace isobit::cuda {
template absl::Status LaunchTrainingPrefill<96>(const PrefillParams&, const Stream&);
template absl::Status LaunchKeyGradient<96>(const GradientParams&, const PassSequences&,
                                            const Stream&);
template absl::Status LaunchQueryGradient<96>(const GradientParams&, const PassSequences&,
                                              const Stream&);
}  // namespace isobit::cuda
