// LinearStreamKernel for 64 rows of x.
#include "kernels/cuda/sm90/linear/stream.cuh"

namespace isobit::cuda {

template absl::Status LaunchStreamOf<64>(const CUtensorMap&, const StreamArgs&, LinearOutput,
                                         contract::LeafSum, const Grid&, const Stream&);

}  // namespace isobit::cuda
