// Addresses, and proxies that the environment names.
#include "common/rpc/channel.h"

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>

#include "gtest/gtest.h"

namespace isobit {
namespace {

TEST(ChannelTest, AnIpv6AddressGetsBracketsOnce) {
  EXPECT_EQ(HostAndPort("127.0.0.1", 80), "127.0.0.1:80");
  EXPECT_EQ(HostAndPort("scorer-0.scorer", 29500), "scorer-0.scorer:29500");
  EXPECT_EQ(HostAndPort("fd00::1", 80), "[fd00::1]:80");
  EXPECT_EQ(HostAndPort("[fd00::1]", 80), "[fd00::1]:80");
}

// Nobody listens at the proxy, so that a channel through it never connects.
TEST(ChannelTest, NoProxyStandsBeforeLoopback) {
  const std::string proxy = "http://127.0.0.1:1";
  for (const char* name : {"http_proxy", "https_proxy", "grpc_proxy"}) {
    ASSERT_EQ(setenv(name, proxy.c_str(), /*overwrite=*/1), 0);
  }
  for (const char* name : {"no_proxy", "no_grpc_proxy"}) ASSERT_EQ(unsetenv(name), 0);
  // The system's c-ares keeps 10 bytes of a look-up, which the leak check would report.
  ASSERT_EQ(setenv("GRPC_DNS_RESOLVER", "native", /*overwrite=*/1), 0);
  int port = 0;
  grpc::CallbackGenericService service;
  grpc::ServerBuilder builder;
  builder.RegisterCallbackGenericService(&service);
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  ASSERT_NE(server, nullptr);
  for (const char* host : {"127.0.0.1", "localhost"}) {
    const std::string address = HostAndPort(host, port);
    const std::shared_ptr<grpc::Channel> channel = MakeChannel(address);
    EXPECT_TRUE(WaitForReady(*channel, address, std::chrono::seconds(30)).ok()) << host;
  }
}

}  // namespace
}  // namespace isobit
