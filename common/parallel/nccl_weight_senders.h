// Weights over NCCL: a WeightSenders with a non-blocking communicator, since a sender may die at
// any moment and every wait must then end.
#ifndef ISOBIT_COMMON_PARALLEL_NCCL_WEIGHT_SENDERS_H_
#define ISOBIT_COMMON_PARALLEL_NCCL_WEIGHT_SENDERS_H_

#include <memory>

#include "common/parallel/weight_senders.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace isobit {

// device: CUDA ordinal. stream: the rank's stream for weights, there; it outlives the object.
// INVARIANT: no fault of a sender stops the rank for longer than max_silence
// (tests/torch/nccl_weights_test.py).
std::unique_ptr<WeightSenders> MakeNcclWeightSenders(int device, CUstream_st* stream);

}  // namespace isobit

#endif  // ISOBIT_COMMON_PARALLEL_NCCL_WEIGHT_SENDERS_H_
