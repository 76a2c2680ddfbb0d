// Builds client channels.
#include "common/rpc/channel.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include "absl/strings/str_cat.h"
#include "common/rpc/server_security.h"
#include "common/rpc/steady_time.h"

namespace isobit {

std::string HostAndPort(const std::string& host, int port) {
  const bool is_bare_ipv6 = host.find(':') != std::string::npos && host.front() != '[';
  return is_bare_ipv6 ? absl::StrCat("[", host, "]:", port) : absl::StrCat(host, ":", port);
}

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address, int max_message_bytes,
                                           const ChannelSecurity& security) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(max_message_bytes);
  arguments.SetMaxSendMessageSize(max_message_bytes);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveTimeMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // A service that is being started is found soon after it listens.
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kMaxReconnectBackoffMs);
  // Whatever http_proxy says: no proxy could reach this machine's own services.
  if (IsLoopback(address.substr(0, address.rfind(':')))) {
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  }
  if (!security.server_name.empty()) arguments.SetSslTargetNameOverride(security.server_name);
  return grpc::CreateCustomChannel(
      address,
      security.credentials != nullptr ? security.credentials : grpc::InsecureChannelCredentials(),
      arguments);
}

absl::Status WaitForReady(grpc::Channel& channel, const std::string& address,
                          std::chrono::milliseconds timeout) {
  if (channel.WaitForConnected(std::chrono::steady_clock::now() + timeout)) {
    return absl::OkStatus();
  }
  return absl::UnavailableError(
      absl::StrCat("no connection to ", address, " within ", timeout.count(), " ms"));
}

}  // namespace isobit
