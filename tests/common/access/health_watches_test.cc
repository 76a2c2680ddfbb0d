// Health watches of one client are bounded, and health still answers.
#include "common/access/health_watches.h"

#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/rpc/channel.h"
#include "common/rpc/server_runner.h"
#include "gtest/gtest.h"
#include "tests/support/server_process.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace isobit {
namespace {

using testing::HasSubstr;
using testing_support::Health;

// A watch of the whole server, from its start to the destructor.
class Watch final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  explicit Watch(grpc::GenericStub& stub) {
    stub.PrepareBidiStreamingCall(&context_, "/grpc.health.v1.Health/Watch", {}, this);
    StartWriteLast(&request_, {});
    StartRead(&answer_);
    StartCall();
    WaitUntil([this] { return has_answer_ || is_done_; });
  }
  ~Watch() override {
    context_.TryCancel();
    WaitUntil([this] { return is_done_; });
  }

  // Of the call's end, which is awaited for a refused watch; OK while it lasts.
  grpc::Status status() {
    const std::lock_guard lock(mutex_);
    return status_;
  }

 private:
  void OnReadDone(bool ok) override {
    const std::lock_guard lock(mutex_);
    has_answer_ = ok;
    changed_.notify_all();
  }
  void OnDone(const grpc::Status& status) override {
    const std::lock_guard lock(mutex_);
    status_ = status;
    is_done_ = true;
    changed_.notify_all();
  }
  template <class Condition>
  void WaitUntil(const Condition& condition) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::seconds(20), condition));
  }

  grpc::ClientContext context_;
  const grpc::Slice empty_ = grpc::Slice("", 0);
  const grpc::ByteBuffer request_{&empty_, 1};
  grpc::ByteBuffer answer_;
  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  bool has_answer_ = false, is_done_ = false;
  grpc::Status status_;
};

TEST(HealthWatchesTest, OneClientHoldsABoundedNumber) {
  const testing_support::TempDir scratch;
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ServerSecurity security,
                              MakeServerSecurity({.has_admin_port = true}, "127.0.0.1"));
  ServerRunner runner(
      ServerOptions{.security = security, .admin_port = 0, .port_file = scratch.File("port")});
  ISOBIT_ASSERT_OK(runner.Start());
  runner.SetServing(true);
  const auto channel = MakeChannel(HostAndPort("127.0.0.1", runner.port()));
  grpc::GenericStub stub(channel);
  std::vector<std::unique_ptr<Watch>> watches;
  for (int64_t i = 0; i < kMaxClientHealthWatches; ++i) {
    watches.push_back(std::make_unique<Watch>(stub));
    ASSERT_TRUE(watches.back()->status().ok()) << watches.back()->status().error_message();
  }
  {
    Watch beyond(stub);
    EXPECT_EQ(beyond.status().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_THAT(beyond.status().error_message(), HasSubstr("1024 of 1024 streams"));
  }
  const auto admin_channel =
      MakeChannel(HostAndPort("127.0.0.1", testing_support::PortIn(scratch.File("port.admin"))));
  grpc::GenericStub admin_stub(admin_channel);
  EXPECT_EQ(Watch(admin_stub).status().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED)
      << "the bound is of both ports together";
  EXPECT_EQ(Health(*channel, ""), "SERVING") << "a check is no watch";
  watches.pop_back();
  bool is_free = false;  // the server sees the end a moment later
  for (int i = 0; i < 200 && !is_free; ++i) {
    is_free = Watch(stub).status().ok();
    if (!is_free) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_TRUE(is_free);
}

}  // namespace
}  // namespace isobit
