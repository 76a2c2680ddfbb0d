// The sum over ranks of mode batch_invariant, for GPUs that map each other's memory.
#ifndef ISOBIT_KERNELS_CUDA_SM90_COLLECTIVE_HOP_ALL_REDUCE_H_
#define ISOBIT_KERNELS_CUDA_SM90_COLLECTIVE_HOP_ALL_REDUCE_H_

#include "kernels/cuda/sm90/collective/all_reduce.h"

namespace isobit::cuda {

// For AllReduceOptions::kernels: adds partials in rank order, rounding to bf16 each time.
AllReduceKernel HopAllReduceKernel(const AllReduceSchedule& schedule, int ranks, bool aligned);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_COLLECTIVE_HOP_ALL_REDUCE_H_
