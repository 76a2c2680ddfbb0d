// Broadcasts of weights over NCCL. The communicator is non-blocking, since the sender may die at
// any moment and every wait must then end.
#ifndef ISOBIT_COMMON_PARALLEL_NCCL_BROADCAST_H_
#define ISOBIT_COMMON_PARALLEL_NCCL_BROADCAST_H_

#include "common/parallel/weight_broadcast.h"

namespace isobit {

// device: the CUDA ordinal on which broadcasts arrive. After joining, the group's ranks all-reduce
// one fp32 value once, as vLLM's PyNcclCommunicator does.
// INVARIANT: no fault of a sender stops the rank for longer than max_silence
// (NcclBroadcastTest.*).
JoinWeightBroadcast NcclBroadcastOn(int device);

}  // namespace isobit

#endif  // ISOBIT_COMMON_PARALLEL_NCCL_BROADCAST_H_
