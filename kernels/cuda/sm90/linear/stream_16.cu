// LinearStreamKernel for 16 rows of x.
#include "kernels/cuda/sm90/linear/stream.cuh"

namespace isobit::cuda {

template absl::Status LaunchStreamOf<16>(const CUtensorMap&, const StreamArgs&, LinearOutput,
                                         contract::LeafSum, const Grid&, const Stream&);

}  // namespace isobit::cuda
