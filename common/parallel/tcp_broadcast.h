// Broadcasts of weights without NCCL, for services on CPUs: rank 0 listens at the address in the
// group's id, and sends the bytes to each rank over a separate connection.
//
// The id: "isobit-tcp HOST:PORT", then zeros up to 128 bytes. A rank connects and sends the id, its
// rank and the number of ranks, each a little-endian uint32. Once all have come, rank 0 sends the
// byte 1 to each. A broadcast is its size in bytes, a little-endian uint64, and the bytes.
#ifndef ISOBIT_COMMON_PARALLEL_TCP_BROADCAST_H_
#define ISOBIT_COMMON_PARALLEL_TCP_BROADCAST_H_

#include <memory>

#include "absl/status/statusor.h"
#include "common/parallel/weight_broadcast.h"

namespace isobit {

// A JoinWeightBroadcast.
absl::StatusOr<std::unique_ptr<WeightBroadcast>> JoinTcpBroadcast(const BroadcastGroup& group,
                                                                  const PeerWait& wait);

}  // namespace isobit

#endif  // ISOBIT_COMMON_PARALLEL_TCP_BROADCAST_H_
