// The prefill schedule for head size 256.
#include "kernels/cuda/attention/prefill.cuh"

namespace isobit::cuda {
template absl::Status LaunchPrefill<256>(const PrefillParams&, const Stream&);
}  // namespace isobit::cuda
