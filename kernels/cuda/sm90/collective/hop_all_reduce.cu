// The all-reduce's kernel with the order of hops.
#include "kernels/contract/vanilla.h"
#include "kernels/cuda/sm90/collective/all_reduce.cuh"
#include "kernels/cuda/sm90/collective/hop_all_reduce.h"

namespace isobit::cuda {
namespace {

struct HopOrder {
  __device__ static float Sum(const float* values, int ranks) {
    return contract::HopSum(values, ranks, 0);
  }
};

}  // namespace

AllReduceKernel HopAllReduceKernel(const AllReduceSchedule& schedule, int ranks, bool aligned) {
  return AllReduceKernelFor<HopOrder>(schedule, ranks, aligned);
}

}  // namespace isobit::cuda
