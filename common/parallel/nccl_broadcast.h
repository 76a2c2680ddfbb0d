// Broadcasts of weights over NCCL. Its communicator is a non-blocking one, since the sender may die
// at any moment, and each wait must end then.
#ifndef ISOBIT_COMMON_PARALLEL_NCCL_BROADCAST_H_
#define ISOBIT_COMMON_PARALLEL_NCCL_BROADCAST_H_

#include "common/parallel/weight_broadcast.h"

namespace isobit {

// device: CUDA ordinal, on which broadcasts arrive. A group's ranks all make one sum of one fp32
// after they have joined, as vLLM's PyNcclCommunicator does.
// INVARIANT: no fault of a sender stops the rank for longer than max_silence
// (NcclBroadcastTest.*).
JoinWeightBroadcast NcclBroadcastOn(int device);

}  // namespace isobit

#endif  // ISOBIT_COMMON_PARALLEL_NCCL_BROADCAST_H_
