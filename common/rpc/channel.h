// Channels to other isobit services, with the house's limits and keepalive.
#ifndef ISOBIT_COMMON_RPC_CHANNEL_H_
#define ISOBIT_COMMON_RPC_CHANNEL_H_

#include <grpcpp/channel.h>

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/status.h"

namespace isobit {

// A plaintext channel to `address` ("host:port"). It connects on first use and reconnects by
// itself.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address);

// Returns once `channel` is connected. UNAVAILABLE naming `address` if it is not within `timeout`.
absl::Status WaitForReady(grpc::Channel& channel, const std::string& address,
                          std::chrono::milliseconds timeout);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_CHANNEL_H_
