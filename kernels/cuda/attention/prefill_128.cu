// The prefill schedule for head size 128.
#include "kernels/cuda/attention/prefill.cuh"

namespace isobit::cuda {
template absl::Status LaunchPrefill<128>(const PrefillParams&, const Stream&);
}  // namespace isobit::cuda
