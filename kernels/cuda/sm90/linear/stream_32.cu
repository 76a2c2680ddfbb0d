// LinearStreamKernel for 32 rows of x.
#include "kernels/cuda/sm90/linear/stream.cuh"

namespace isobit::cuda {

template absl::Status LaunchStreamOf<32>(const CUtensorMap&, const StreamArgs&, LinearOutput,
                                         contract::LeafSum, const Grid&, const Stream&);

}  // namespace isobit::cuda
