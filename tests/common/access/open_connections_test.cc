// Whose connections count together, and the bounds on them.
#include "common/access/open_connections.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/descriptor.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using testing::HasSubstr;
using testing_support::StatusIs;

sockaddr_storage Address(const std::string& text) {
  sockaddr_storage storage{};
  auto& v4 = reinterpret_cast<sockaddr_in&>(storage);
  auto& v6 = reinterpret_cast<sockaddr_in6&>(storage);
  const bool is_v4 = inet_pton(AF_INET, text.c_str(), &v4.sin_addr) == 1;
  EXPECT_TRUE(is_v4 || inet_pton(AF_INET6, text.c_str(), &v6.sin6_addr) == 1) << text;
  storage.ss_family = is_v4 ? AF_INET : AF_INET6;
  return storage;
}

CallerAddress CallerAt(const std::string& text) { return CallerAddressOf(Address(text)); }

Descriptor NewSocket() { return Descriptor(socket(AF_INET, SOCK_STREAM, 0)); }

TEST(CallerAddressTest, OneHostHasOneName) {
  EXPECT_EQ(CallerAt("10.0.0.7").name, "10.0.0.7");
  EXPECT_EQ(CallerAt("::ffff:10.0.0.7").name, "10.0.0.7");
  EXPECT_EQ(CallerAt("2001:db8:1:2::1").name, "2001:db8:1:2::/64");
  EXPECT_EQ(CallerAt("2001:db8:1:2:ffff::9").name, "2001:db8:1:2::/64");
  EXPECT_NE(CallerAt("2001:db8:1:3::1").name, CallerAt("2001:db8:1:2::1").name);
  for (const char* own : {"127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1"}) {
    EXPECT_TRUE(CallerAt(own).is_loopback) << own;
  }
  for (const char* other : {"10.0.0.7", "2001:db8::1", "::ffff:10.0.0.7", "::2"}) {
    EXPECT_FALSE(CallerAt(other).is_loopback) << other;
  }
}

TEST(OpenConnectionsTest, OneAddressDoesNotTakeAllPlaces) {
  OpenConnections open(/*max_total=*/6, /*max_of_address=*/2, /*exempts_loopback=*/true);
  std::vector<Descriptor> sockets;
  const auto add = [&](const std::string& address) {
    sockets.push_back(NewSocket());
    return open.Add(sockets.back().get(), CallerAt(address));
  };
  for (const char* address : {"10.0.0.1", "10.0.0.2"}) {
    ISOBIT_EXPECT_OK(add(address));
    ISOBIT_EXPECT_OK(add(address));
    EXPECT_THAT(add(address), StatusIs(absl::StatusCode::kResourceExhausted,
                                       HasSubstr(absl::StrCat("=2 are open of ", address))));
  }
  ISOBIT_EXPECT_OK(add("127.0.0.1"));
  ISOBIT_EXPECT_OK(add("127.0.0.1"));
  EXPECT_THAT(add("127.0.0.1"),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("--max_connections=6")));
}

TEST(OpenConnectionsTest, WhatIsGoneCountsNoMore) {
  OpenConnections open(/*max_total=*/100, /*max_of_address=*/2, /*exempts_loopback=*/false);
  const CallerAddress caller = CallerAt("127.0.0.1");
  for (int round = 0; round < 50; ++round) {
    // In some rounds a descriptor number is used again by another socket, in others not.
    std::vector<Descriptor> between;
    if (round % 3 == 0) between.push_back(NewSocket());
    Descriptor first = NewSocket(), second = NewSocket(), third = NewSocket();
    for (const Descriptor* socket : {&first, &second}) {
      // Sweeps may take only a share of the time, so after one the next has to wait a while.
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
      absl::Status added = open.Add(socket->get(), caller);
      while (!added.ok() && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
        added = open.Add(socket->get(), caller);
      }
      ISOBIT_ASSERT_OK(added) << "round " << round;
    }
    EXPECT_FALSE(open.Add(third.get(), caller).ok()) << "round " << round;
  }
}

}  // namespace
}  // namespace isobit
