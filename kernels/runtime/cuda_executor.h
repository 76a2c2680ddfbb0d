// A rank that computes on a GPU. Steps with one new token per sequence replay CUDA graphs, which
// are captured at the start for a series of batch sizes. Drawn tokens feed the next step on the
// GPU, so the host is one step behind (depth 2).
#ifndef ISOBIT_KERNELS_RUNTIME_CUDA_EXECUTOR_H_
#define ISOBIT_KERNELS_RUNTIME_CUDA_EXECUTOR_H_

#include "kernels/runtime/cuda_rank_options.h"
#include "kernels/runtime/rank_executor.h"

namespace isobit {

// All ranks of one engine come from one such function. Errors when a rank is made:
// INVALID_ARGUMENT: the number of devices differs from the number of ranks, a device repeats, a
// variant pass is asked for in another mode than tree, or the vocabulary exceeds kMaxDeviceVocab
// (sm90/log_probs/log_probs.h). FAILED_PRECONDITION: a device does not exist, is not Hopper or
// cannot map the others' memory. RESOURCE_EXHAUSTED: a device has too little free memory.
MakeRank MakeCudaRank(const CudaRankOptions& options);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_CUDA_EXECUTOR_H_
