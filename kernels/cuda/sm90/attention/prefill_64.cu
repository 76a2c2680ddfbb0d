// The prefill schedule for head size 64.
#include "kernels/cuda/sm90/attention/prefill.cuh"

namespace isobit::cuda {
template absl::Status LaunchPrefill<64>(const PrefillParams&, const Stream&);
}  // namespace isobit::cuda
