// The client of a trainer's store against servers that answer well, lie, hang or go away. That it
// speaks the protocol of PyTorch's own server is seen in tests/torch/tcp_store_test.py.
#include "common/parallel/tcp_store.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/loopback_peer.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using absl::StatusCode;
using std::chrono::milliseconds;
using testing::HasSubstr;
using testing_support::LoopbackListener;
using testing_support::Raw;
using testing_support::ReceiveAll;
using testing_support::SendAll;
using testing_support::StatusIs;

std::string Text(const std::string& text) { return absl::StrCat(Raw<uint64_t>(text.size()), text); }

// What a client says: that it is one; one more worker; it waits for a key; it wants the key.
const std::string kHello = absl::StrCat(Raw<uint8_t>(0), Raw<uint32_t>(0x3C85F7CE));
const std::string kOneMore = absl::StrCat(Raw<uint8_t>(4), Text("init/"), Raw<int64_t>(1));
const std::string kKey = Text("/broadcast_from/0/0");
const std::string kWaits = absl::StrCat(Raw<uint8_t>(6), Raw<uint64_t>(1), kKey);
const std::string kWants = absl::StrCat(Raw<uint8_t>(3), kKey);

bool Expect(int fd, const std::string& expected) {
  std::string said;
  return ReceiveAll(fd, expected.size(), said) && said == expected;
}

class TcpStoreTest : public testing::Test {
 protected:
  void TearDown() override {
    if (server_.joinable()) server_.join();
  }
  // Serves one client with `serve`.
  void Serve(std::function<void(int fd)> serve) {
    server_ = std::thread([this, serve = std::move(serve)] {
      const Descriptor client = listener_.Accept();
      serve(client.get());
    });
  }
  // Serves one client up to the wait for the key, then does `rest`.
  void ServeUntilItWaits(std::function<void(int fd)> rest) {
    Serve([rest = std::move(rest)](int fd) {
      EXPECT_TRUE(Expect(fd, kHello));
      EXPECT_TRUE(Expect(fd, kOneMore));
      SendAll(fd, Raw<int64_t>(2));
      EXPECT_TRUE(Expect(fd, kWaits));
      rest(fd);
    });
  }
  absl::StatusOr<std::string> Get(milliseconds limit = milliseconds(20'000)) {
    return GroupIdInStore(
        "127.0.0.1", listener_.port(),
        {.deadline = std::chrono::steady_clock::now() + limit, .check = [this]() -> absl::Status {
           if (is_cancelled_) return absl::CancelledError("nobody waits");
           return absl::OkStatus();
         }});
  }
  // Until the client has gone.
  static void AwaitEnd(int fd) {
    std::string byte;
    EXPECT_FALSE(ReceiveAll(fd, 1, byte));
  }

  LoopbackListener listener_;
  std::thread server_;
  std::atomic<bool> is_cancelled_{false};
};

TEST_F(TcpStoreTest, GetsTheFirstObjectThatRank0Broadcasts) {
  std::string id(128, '\0');
  for (size_t i = 0; i < id.size(); ++i) id[i] = static_cast<char>(i * 7 + 129);
  const std::string pickle =
      absl::StrCat("\x80\x03", "c_ctypes\n_unpickle\ncm\nncclUniqueId\n}C\x80", id, "\x86\x86R.");
  ServeUntilItWaits([&](int fd) {
    SendAll(fd, Raw<uint8_t>(0));
    EXPECT_TRUE(Expect(fd, kWants));
    const std::string answer = Text(pickle);
    for (const char byte : answer) SendAll(fd, std::string(1, byte));  // in pieces
  });
  ISOBIT_ASSERT_OK_AND_ASSIGN(const std::string got, Get());
  EXPECT_EQ(got, id);
}

TEST_F(TcpStoreTest, RefusesALengthThatLies) {
  ServeUntilItWaits([](int fd) {
    SendAll(fd, Raw<uint8_t>(0));
    EXPECT_TRUE(Expect(fd, kWants));
    SendAll(fd, Raw<uint64_t>(uint64_t{1} << 62));
    AwaitEnd(fd);
  });
  EXPECT_THAT(Get(), StatusIs(StatusCode::kInvalidArgument,
                              HasSubstr("4611686018427387904 bytes under \"broadcast_from/0/0\", "
                                        "expected at most 4096")));
}

TEST_F(TcpStoreTest, RefusesAnEndlessPickle) {
  ServeUntilItWaits([](int fd) {
    SendAll(fd, Raw<uint8_t>(0));
    EXPECT_TRUE(Expect(fd, kWants));
    SendAll(fd, Raw<uint64_t>(4096));
    while (SendAll(fd, std::string(4096, '\x80'))) {
    }
  });
  EXPECT_THAT(Get(), StatusIs(StatusCode::kInvalidArgument, HasSubstr("is not the pickle of")));
}

TEST_F(TcpStoreTest, RefusesOtherAnswers) {
  ServeUntilItWaits([](int fd) {
    SendAll(fd, Raw<uint8_t>(1));
    AwaitEnd(fd);
  });
  EXPECT_THAT(Get(), StatusIs(StatusCode::kInvalidArgument, HasSubstr("a wait with 1")));
  server_.join();
  Serve([](int fd) {
    SendAll(fd, Raw<int64_t>(-5));
    std::string said;
    while (ReceiveAll(fd, 1, said)) {
    }
  });
  EXPECT_THAT(Get(), StatusIs(StatusCode::kInvalidArgument, HasSubstr("counts -5 workers")));
}

TEST_F(TcpStoreTest, SaysThatTheStoreHasGone) {
  ServeUntilItWaits([](int) {});
  EXPECT_THAT(Get(), StatusIs(StatusCode::kUnavailable, HasSubstr("has closed the connection")));
}

TEST_F(TcpStoreTest, AStoreThatHangsHoldsNobody) {
  ServeUntilItWaits(AwaitEnd);
  EXPECT_THAT(Get(milliseconds(200)),
              StatusIs(StatusCode::kDeadlineExceeded,
                       HasSubstr(absl::StrCat("store at 127.0.0.1:", listener_.port()))));
}

TEST_F(TcpStoreTest, ACallerThatGoesEndsTheWait) {
  ServeUntilItWaits([this](int fd) {
    is_cancelled_ = true;
    AwaitEnd(fd);
  });
  EXPECT_THAT(Get(), StatusIs(StatusCode::kCancelled));
}

TEST_F(TcpStoreTest, NobodyListensYet) {
  const int port = [] { return LoopbackListener().port(); }();  // free again
  const auto get = [&](milliseconds limit) {
    return GroupIdInStore("127.0.0.1", port,
                          {.deadline = std::chrono::steady_clock::now() + limit});
  };
  EXPECT_THAT(get(milliseconds(150)),
              StatusIs(StatusCode::kDeadlineExceeded, HasSubstr("Connection refused")));
  EXPECT_THAT(GroupIdInStore("no.such.host.invalid", 1,
                             {.deadline = std::chrono::steady_clock::now() + milliseconds(150)}),
              StatusIs(StatusCode::kUnavailable, HasSubstr("no.such.host.invalid")));
}

}  // namespace
}  // namespace isobit
