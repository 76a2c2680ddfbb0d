// What becomes of calls in flight when the access file changes: in a real server, over plain
// loopback connections. tests/attack/access_test.py does it with the services.
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/server_builder.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <fstream>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/access/call_gate.h"
#include "common/base/digest.h"
#include "common/rpc/server_credentials.h"
#include "common/rpc/steady_time.h"
#include "common/rpc/stream_writer.h"
#include "common/rpc/unary_call.h"
#include "gtest/gtest.h"
#include "isobit/v1/rollout.grpc.pb.h"
#include "nlohmann/json.hpp"
#include "proto/isobit/status_convert.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace isobit {
namespace {

using testing::HasSubstr;
using testing_support::StatusIs;
using testing_support::TempDir;
constexpr auto kDenied = absl::StatusCode::kPermissionDenied;
constexpr auto kUnauthenticated = absl::StatusCode::kUnauthenticated;

// Calls that wait until the test answers them.
class WaitingRollout final : public v1::RolloutService::CallbackService {
 public:
  explicit WaitingRollout(CallGate& gate) : gate_(gate) {}

  grpc::ServerWriteReactor<v1::TappedSample>* Tap(grpc::CallbackServerContext* context,
                                                  const v1::TapRequest*) override {
    auto writer =
        StreamWriter<v1::TappedSample>::Start(context, {.on_cancel = [this] { ++num_cancelled; }});
    writer->Write(v1::TappedSample());
    return writer.get();
  }
  grpc::ServerUnaryReactor* PauseGeneration(grpc::CallbackServerContext* context,
                                            const v1::PauseGenerationRequest*,
                                            v1::PauseGenerationResponse*) override {
    return AnswerLater(context, gate_, absl::StatusOr<int>(0), nullptr,
                       [this](int, const std::shared_ptr<UnaryCall>& call) {
                         const std::lock_guard lock(mutex_);
                         waiting_ = call;
                         changed_.notify_all();
                       });
  }
  grpc::ServerUnaryReactor* ContinueGeneration(grpc::CallbackServerContext* context,
                                               const v1::ContinueGenerationRequest*,
                                               v1::ContinueGenerationResponse*) override {
    const absl::Status allowed = gate_.Recheck(*context);
    if (allowed.ok()) ++num_continued;
    return Answer(context, allowed);
  }

  // The call of PauseGeneration that waits, once it is there.
  std::shared_ptr<UnaryCall> TakeWaiting() {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(
        changed_.wait_for(lock, std::chrono::seconds(20), [this] { return waiting_ != nullptr; }));
    return std::exchange(waiting_, nullptr);
  }

  std::atomic<int> num_cancelled{0}, num_continued{0};

 private:
  CallGate& gate_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<UnaryCall> waiting_;
};

// A call whose message comes when the test sends it.
class LateCall final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  LateCall(grpc::GenericStub& stub, const std::string& method, const std::string& token) {
    context_.AddMetadata("authorization", "Bearer " + token);
    context_.set_deadline(std::chrono::steady_clock::now() + std::chrono::seconds(20));
    stub.PrepareBidiStreamingCall(&context_, method, {}, this);
    AddHold();
    StartRead(&answer_);
    StartCall();
  }
  grpc::Status SendAndWait() {
    StartWriteLast(&request_, {});
    RemoveHold();
    return done_.get_future().get();
  }

 private:
  void OnDone(const grpc::Status& status) override { done_.set_value(status); }

  grpc::ClientContext context_;
  const grpc::Slice empty_ = grpc::Slice("", 0);
  const grpc::ByteBuffer request_{&empty_, 1};
  grpc::ByteBuffer answer_;
  std::promise<grpc::Status> done_;
};

class AccessChangesTest : public testing::Test {
 protected:
  AccessChangesTest() {
    Allow({{"stays", R"("compare", "admin")"}, {"leaves", R"("compare", "admin")"}});
    gate_ = CallGate::Create({.access = *AccessFile::Open(dir_.File("access.json")),
                              .audit = *AuditLog::Open(dir_.File("audit"))});
    service_ = std::make_unique<WaitingRollout>(*gate_);
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", LoopbackCredentials(gate_->CheckFor(Listener::kMain)),
                             &port);
    builder.RegisterService(service_.get());
    std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> factories;
    factories.push_back(gate_->InterceptorFor(Listener::kMain));
    builder.experimental().SetInterceptorCreators(std::move(factories));
    server_ = builder.BuildAndStart();
    channel_ =
        grpc::CreateChannel(absl::StrCat("127.0.0.1:", port), grpc::InsecureChannelCredentials());
    stub_ = v1::RolloutService::NewStub(channel_);
  }

  // Writes the access file: names, which are the tokens, and roles.
  void Allow(const std::vector<std::pair<std::string, std::string>>& clients) {
    std::string text;
    for (const auto& [name, roles] : clients) {
      absl::StrAppend(&text, text.empty() ? "" : ",", "{\"name\": \"", name, "\", \"roles\": [",
                      roles, "], \"token_sha256\": [\"", Sha256Hex(name.data(), name.size()),
                      "\"]}");
    }
    dir_.Write("access.json", "{\"clients\": [" + text + "]}");
  }
  void AllowOnlyStays() { Allow({{"stays", R"("compare", "admin")"}}); }

  static void Prepare(grpc::ClientContext& context, const std::string& token) {
    context.AddMetadata("authorization", "Bearer " + token);
    context.set_deadline(std::chrono::steady_clock::now() + std::chrono::seconds(20));
  }

  // Begins a PauseGeneration of `token`.
  std::future<absl::Status> Pause(const std::string& token) {
    return std::async(std::launch::async, [this, token] {
      grpc::ClientContext context;
      Prepare(context, token);
      v1::PauseGenerationResponse response;
      return FromGrpcStatus(stub_->PauseGeneration(&context, {}, &response), context);
    });
  }

  nlohmann::json LastAuditLine() {
    std::ifstream file(dir_.File("audit"));
    std::string last;
    for (std::string line; std::getline(file, line);) last = line;
    return last.empty() ? nlohmann::json() : nlohmann::json::parse(last);
  }

  const TempDir dir_;
  std::shared_ptr<CallGate> gate_;
  std::unique_ptr<WaitingRollout> service_;
  std::unique_ptr<grpc::Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::RolloutService::Stub> stub_;
};

TEST_F(AccessChangesTest, AStreamEndsWithTheRefusalOfANewCall) {
  grpc::ClientContext of_stays, of_leaves;
  Prepare(of_stays, "stays");
  Prepare(of_leaves, "leaves");
  const auto stays = stub_->Tap(&of_stays, {});
  auto leaves = stub_->Tap(&of_leaves, {});
  v1::TappedSample sample;
  ASSERT_TRUE(stays->Read(&sample));
  ASSERT_TRUE(leaves->Read(&sample));

  Allow({{"stays", R"("compare", "admin")"}, {"leaves", R"("generate")"}});  // a role less
  EXPECT_FALSE(leaves->Read(&sample));
  EXPECT_THAT(FromGrpcStatus(leaves->Finish(), of_leaves),
              StatusIs(kDenied, HasSubstr("client \"leaves\" lacks the role compare")));

  while (service_->num_cancelled == 0) std::this_thread::yield();  // its handler learns it, too
  EXPECT_EQ(service_->num_cancelled, 1) << "the other stream goes on";
  Allow({{"other", R"("compare")"}});
  EXPECT_FALSE(stays->Read(&sample));
  EXPECT_THAT(FromGrpcStatus(stays->Finish(), of_stays), StatusIs(kUnauthenticated));
}

TEST_F(AccessChangesTest, NothingTakesEffectForAClientThatHasLeft) {
  std::future<absl::Status> leaves = Pause("leaves");
  const std::shared_ptr<UnaryCall> of_leaves = service_->TakeWaiting();
  std::future<absl::Status> stays = Pause("stays");
  const std::shared_ptr<UnaryCall> of_stays = service_->TakeWaiting();
  EXPECT_FALSE(of_leaves->is_abandoned());
  AllowOnlyStays();
  // At once, without waiting for the next look at the file.
  EXPECT_TRUE(of_leaves->is_abandoned());
  EXPECT_FALSE(of_stays->is_abandoned());
  of_leaves->Answer(absl::CancelledError("the caller of the pause has gone"));
  EXPECT_THAT(leaves.get(), StatusIs(kUnauthenticated));
  EXPECT_EQ(LastAuditLine()["client"], "leaves");
  EXPECT_EQ(LastAuditLine()["outcome"], "UNAUTHENTICATED");
  of_stays->Answer(absl::OkStatus());
  ISOBIT_EXPECT_OK(stays.get());
  EXPECT_EQ(LastAuditLine()["outcome"], "OK");
}

TEST_F(AccessChangesTest, WhatHasTakenEffectIsNotedAsItIs) {
  std::future<absl::Status> leaves = Pause("leaves");
  const std::shared_ptr<UnaryCall> call = service_->TakeWaiting();
  AllowOnlyStays();
  leaves.wait();  // the watcher has ended it
  EXPECT_THAT(leaves.get(), StatusIs(kUnauthenticated));
  call->Answer(absl::OkStatus());
  EXPECT_EQ(LastAuditLine()["client"], "leaves");
  EXPECT_EQ(LastAuditLine()["outcome"], "OK");
}

TEST_F(AccessChangesTest, AMessageThatComesAfterTheClientHasLeftIsRefused) {
  grpc::GenericStub stub(channel_);
  const std::string method = "/isobit.v1.RolloutService/ContinueGeneration";
  LateCall stays(stub, method, "stays"), leaves(stub, method, "leaves");
  // A connection keeps the order of calls: once this one is answered, their headers are checked.
  std::future<absl::Status> later = Pause("stays");
  service_->TakeWaiting()->Answer(absl::OkStatus());
  ISOBIT_EXPECT_OK(later.get());
  AllowOnlyStays();
  EXPECT_EQ(leaves.SendAndWait().error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(service_->num_continued, 0);
  EXPECT_EQ(stays.SendAndWait().error_code(), grpc::StatusCode::OK);
  EXPECT_EQ(service_->num_continued, 1);
}

TEST_F(AccessChangesTest, ABrokenFileEndsNothing) {
  grpc::ClientContext context;
  Prepare(context, "leaves");
  const auto tap = stub_->Tap(&context, {});
  v1::TappedSample sample;
  ASSERT_TRUE(tap->Read(&sample));
  std::future<absl::Status> leaves = Pause("leaves");
  const std::shared_ptr<UnaryCall> call = service_->TakeWaiting();
  dir_.Write("access.json", "{\"clients\": [");
  EXPECT_FALSE(call->is_abandoned());
  call->Answer(absl::OkStatus());
  ISOBIT_EXPECT_OK(leaves.get());
  EXPECT_EQ(service_->num_cancelled, 0);
  context.TryCancel();
}

}  // namespace
}  // namespace isobit
