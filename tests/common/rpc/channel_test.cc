// Addresses.
#include "common/rpc/channel.h"

#include "gtest/gtest.h"

namespace isobit {
namespace {

TEST(ChannelTest, AnIpv6AddressGetsBracketsOnce) {
  EXPECT_EQ(HostAndPort("127.0.0.1", 80), "127.0.0.1:80");
  EXPECT_EQ(HostAndPort("scorer-0.scorer", 29500), "scorer-0.scorer:29500");
  EXPECT_EQ(HostAndPort("fd00::1", 80), "[fd00::1]:80");
  EXPECT_EQ(HostAndPort("[fd00::1]", 80), "[fd00::1]:80");
}

}  // namespace
}  // namespace isobit
