// A rank that computes on a GPU. Steps of one new token a sequence replay CUDA graphs, captured at
// start for a ladder of batch sizes; drawn tokens feed the next step on the GPU, so the host is one
// step behind (depth 2).
#ifndef ISOBIT_KERNELS_RUNTIME_CUDA_EXECUTOR_H_
#define ISOBIT_KERNELS_RUNTIME_CUDA_EXECUTOR_H_

#include "kernels/runtime/cuda_rank_options.h"
#include "kernels/runtime/rank_executor.h"

namespace isobit {

// All ranks of one engine come from one such function. Errors at the making of a rank: devices are
// not as many as the ranks, each another, a fast path stands beside another mode than tree, or the
// vocabulary is beyond kMaxDeviceVocab of log_probs/log_probs.h (INVALID_ARGUMENT); devices are
// absent, not Hopper or unable to map each other's memory (FAILED_PRECONDITION), full
// (RESOURCE_EXHAUSTED).
MakeRank MakeCudaRank(const CudaRankOptions& options);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_CUDA_EXECUTOR_H_
