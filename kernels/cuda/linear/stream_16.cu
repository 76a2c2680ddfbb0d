// LinearStreamKernel for 16 rows of x.
#include "kernels/cuda/linear/stream.cuh"

namespace isobit::cuda {

template absl::Status LaunchStreamOf<16>(const CUtensorMap&, const StreamArgs&, LinearOutput,
                                         contract::LeafSum, const Grid&, const Stream&);

}  // namespace isobit::cuda
