// Channels to other isobit services, with the limits and keepalive of limits.h.
#ifndef ISOBIT_COMMON_RPC_CHANNEL_H_
#define ISOBIT_COMMON_RPC_CHANNEL_H_

#include <grpcpp/channel.h>

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "common/rpc/channel_security.h"
#include "common/rpc/limits.h"

namespace isobit {

// "host:port", with brackets around an IPv6 address.
std::string HostAndPort(const std::string& host, int port);

// A channel to `address` ("host:port"), in plain text unless `security` says otherwise. It connects
// on first use and reconnects by itself. To this machine it bypasses any proxy that the environment
// names. max_message_bytes: in either direction; -1: no limit.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address,
                                           int max_message_bytes = kMaxMessageBytes,
                                           const ChannelSecurity& security = {});

// Returns once `channel` is connected. UNAVAILABLE, naming `address`: not within `timeout`.
absl::Status WaitForReady(grpc::Channel& channel, const std::string& address,
                          std::chrono::milliseconds timeout);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_CHANNEL_H_
