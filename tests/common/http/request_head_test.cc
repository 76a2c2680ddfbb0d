// ParseRequestHead and HostNames: what of a request is read, and by which names a server is called.
#include "common/http/request_head.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

TEST(HeadSizeTest, EndsWithTheEmptyLine) {
  EXPECT_EQ(HeadSize(""), 0U);
  EXPECT_EQ(HeadSize("GET / HTTP/1.1\r\nA: b\r\n"), 0U);
  EXPECT_EQ(HeadSize("GET / HTTP/1.1\r\n\r\nrest"), 18U);
  EXPECT_EQ(HeadSize("GET / HTTP/1.1\nA: b\n\n"), 21U);
  EXPECT_EQ(HeadSize("\r\n"), 0U);  // an empty line before the request ends nothing
}

TEST(RequestHeadTest, KeepsHostAndAuthorizationAlone) {
  const auto head = ParseRequestHead(
      "GET /events?x=%41 HTTP/1.1\r\nhost: a:1\r\nRange: bytes=0-\r\nAccept-Encoding: br\r\n"
      "Expect: 100-continue\r\nAUTHORIZATION:Bearer x\r\nAuthorization: Bearer y\r\n\r\n");
  ISOBIT_ASSERT_OK(head.status());
  EXPECT_EQ(head->path, "/events");
  EXPECT_EQ(head->host, "a:1");
  // Both: two of them count as a wrong one.
  EXPECT_EQ(head->text,
            "GET /events HTTP/1.1\r\nhost: a:1\r\nAUTHORIZATION: Bearer x\r\n"
            "Authorization: Bearer y\r\n\r\n");
}

TEST(RequestHeadTest, RefusesWhatIsNoPlainRequest) {
  const std::string host = "Host: a\r\n\r\n";
  for (const std::string& text :
       {std::string("GET /\r\n\r\n"), "GET / HTTP/2.0\r\n" + host, "GET  / HTTP/1.1\r\n" + host,
        std::string("\r\n\r\n"), std::string("GET / HTTP/1.1\r\n\r\n"),
        "GET / HTTP/1.1\r\nHost: b\r\n" + host, "GET / HTTP/1.1\r\n continued\r\n" + host,
        "GET / HTTP/1.1\r\n: x\r\n" + host, "GET / HTTP/1.1\r\nX\r\n" + host,
        "GET / HTTP/1.1\r\nX: a\rb\r\n" + host,
        std::string("GET / HTTP/1.1\r\nX: a\0b\r\n", 24) + host}) {
    EXPECT_EQ(ParseRequestHead(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
  for (const char* method : {"POST", "get", "CONNECT", ""}) {
    EXPECT_EQ(ParseRequestHead(std::string(method) + " / HTTP/1.1\r\n" + host).status().code(),
              absl::StatusCode::kUnimplemented)
        << method;
  }
  for (const char* target : {"http://a/", "*", "/%68ealthz",
                             "/\x25"
                             "2e"}) {
    EXPECT_EQ(
        ParseRequestHead("GET " + std::string(target) + " HTTP/1.1\r\n" + host).status().code(),
        absl::StatusCode::kNotFound)
        << target;
  }
  ISOBIT_EXPECT_OK(ParseRequestHead("GET / HTTP/1.0\r\n\r\n").status());
}

TEST(HostNamesTest, LoopbackAddressesAndNamesOfFlags) {
  const HostNames names({"Rollout", "metrics.example."});
  for (const char* host :
       {"localhost", "LOCALHOST:80", "localhost.", "127.0.0.1", "127.0.0.1:9100", "[::1]",
        "[::1]:80", "10.0.0.7:9100", "rollout:9100", "metrics.example", "METRICS.example.:1"}) {
    EXPECT_TRUE(names.Allow(host)) << host;
  }
  for (const char* host :
       {"rebound.example", "rebound.example:9100", "127.0.0.1.rebound.example", "localhost.example",
        "xlocalhost", "rollout.example", "metrics.example.org", "127.0.0.1@rebound.example",
        "[rebound.example]", "", ":80", "*", "2130706433", "0x7f.1"}) {
    EXPECT_FALSE(names.Allow(host)) << host;
  }
  EXPECT_TRUE(HostNames({"*"}).Allow("rebound.example"));
}

}  // namespace
}  // namespace isobit
