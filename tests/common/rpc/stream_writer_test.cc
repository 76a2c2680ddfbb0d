// StreamWriter over real connections: order, bounds, back-pressure, cancellation and their races.
#include "common/rpc/stream_writer.h"

#include <grpcpp/client_context.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "common/rpc/channel.h"
#include "common/rpc/server_runner.h"
#include "gtest/gtest.h"
#include "isobit/v1/rollout.grpc.pb.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using testing_support::StatusIs;
using Writer = StreamWriter<v1::GenerateResponse>;
using Reader = grpc::ClientReader<v1::GenerateResponse>;

// Generate calls `handler`, which starts and fills the writer.
class FakeService final : public v1::RolloutService::CallbackService {
 public:
  using Handler = std::function<std::shared_ptr<Writer>(grpc::CallbackServerContext*,
                                                        const v1::GenerateRequest&)>;
  explicit FakeService(Handler handler) : handler_(std::move(handler)) {}

  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(
      grpc::CallbackServerContext* context, const v1::GenerateRequest* request) override {
    return handler_(context, *request).get();
  }

 private:
  Handler handler_;
};

// A server and a channel to it.
class Loopback {
 public:
  explicit Loopback(FakeService::Handler handler)
      : service_(std::move(handler)), runner_(ServerOptions{}) {
    runner_.Register(&service_, v1::RolloutService::service_full_name());
    ISOBIT_EXPECT_OK(runner_.Start());
    stub_ = v1::RolloutService::NewStub(MakeChannel("127.0.0.1:" + std::to_string(runner_.port())));
  }

  std::unique_ptr<Reader> Generate(grpc::ClientContext* context, const std::string& id = "") {
    v1::GenerateRequest request;
    request.set_request_id(id);
    return stub_->Generate(context, request);
  }

 private:
  FakeService service_;
  ServerRunner runner_;
  std::unique_ptr<v1::RolloutService::Stub> stub_;
};

v1::GenerateResponse Chunk(uint32_t token, size_t padding = 0) {
  v1::GenerateResponse response;
  response.mutable_chunk()->mutable_tokens()->add_token_ids(token);
  response.set_request_id(std::string(padding, 'x'));
  return response;
}

TEST(StreamWriterTest, DeliversInOrderThenStatusThoughAllIsWrittenInTheHandler) {
  Loopback loopback([](grpc::CallbackServerContext* context, const v1::GenerateRequest&) {
    auto writer = Writer::Start(context);
    for (uint32_t i = 0; i < 100; ++i) EXPECT_EQ(writer->Write(Chunk(i)), WriteResult::kQueued);
    writer->Finish(
        WithRetryAfter(absl::ResourceExhaustedError("enough"), std::chrono::milliseconds(70)));
    writer->Finish(absl::OkStatus());
    EXPECT_EQ(writer->Write(Chunk(100)), WriteResult::kClosed);
    return writer;
  });
  grpc::ClientContext context;
  auto reader = loopback.Generate(&context);
  v1::GenerateResponse response;
  uint32_t count = 0;
  while (reader->Read(&response)) EXPECT_EQ(response.chunk().tokens().token_ids(0), count++);
  EXPECT_EQ(count, 100u);
  const absl::Status status = FromGrpcStatus(reader->Finish(), context);
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted, "enough"));
  EXPECT_EQ(RetryAfter(status), std::chrono::milliseconds(70));
}

TEST(StreamWriterTest, SlowReaderIsBoundedAndOthersAreUnaffected) {
  constexpr size_t kBound = 1 << 20;
  constexpr size_t kPadding = 64 << 10;
  std::shared_ptr<Writer> slow;
  absl::Notification started;
  Loopback loopback([&](grpc::CallbackServerContext* context, const v1::GenerateRequest& request) {
    auto writer = Writer::Start(context, {.max_queued_bytes = kBound});
    if (request.request_id() == "slow") {
      slow = writer;
      started.Notify();
    } else {
      writer->Write(Chunk(7));
      writer->Finish(absl::OkStatus());
    }
    return writer;
  });

  grpc::ClientContext slow_context;
  auto slow_reader = loopback.Generate(&slow_context, "slow");
  started.WaitForNotification();
  uint32_t accepted = 0;
  while (slow->Write(Chunk(accepted, kPadding)) == WriteResult::kQueued) {
    ASSERT_LT(++accepted, 1000u) << "the queue has no bound";
  }
  EXPECT_GE(accepted, kBound / kPadding);

  grpc::ClientContext other_context;
  auto other_reader = loopback.Generate(&other_context, "other");
  v1::GenerateResponse response;
  EXPECT_TRUE(other_reader->Read(&response));
  EXPECT_FALSE(other_reader->Read(&response));
  EXPECT_TRUE(other_reader->Finish().ok());

  slow->Finish(absl::ResourceExhaustedError("reader too slow"));
  uint32_t received = 0;
  while (slow_reader->Read(&response)) ++received;
  EXPECT_EQ(received, accepted) << "what was accepted must arrive";
  EXPECT_EQ(slow_reader->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST(StreamWriterTest, SaysWhenAFullQueueHasRoomAgain) {
  std::shared_ptr<Writer> writer;
  absl::Notification started;
  absl::Notification writable;
  Loopback loopback([&](grpc::CallbackServerContext* context, const v1::GenerateRequest&) {
    writer = Writer::Start(
        context, {.max_queued_bytes = 1 << 20, .on_writable = [&] { writable.Notify(); }});
    started.Notify();
    return writer;
  });
  grpc::ClientContext context;
  auto reader = loopback.Generate(&context);
  started.WaitForNotification();
  while (writer->Write(Chunk(0, 64 << 10)) == WriteResult::kQueued) {
  }
  EXPECT_FALSE(writable.HasBeenNotified());
  v1::GenerateResponse response;
  while (!writable.HasBeenNotified()) ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(writer->Write(Chunk(1)), WriteResult::kQueued);
  writer->Finish(absl::OkStatus());
  while (reader->Read(&response)) {
  }
  EXPECT_EQ(response.chunk().tokens().token_ids(0), 1u);
  EXPECT_TRUE(reader->Finish().ok());
}

TEST(StreamWriterTest, CoalescesWaitingMessagesWithoutLoss) {
  constexpr uint32_t kTokens = 5000;
  Loopback loopback([](grpc::CallbackServerContext* context, const v1::GenerateRequest&) {
    auto writer = Writer::Start(
        context, {.coalesce = [](v1::GenerateResponse& last, v1::GenerateResponse& next) {
          last.mutable_chunk()->mutable_tokens()->MergeFrom(next.chunk().tokens());
          return true;
        }});
    for (uint32_t i = 0; i < kTokens; ++i) writer->Write(Chunk(i));
    writer->Finish(absl::OkStatus());
    return writer;
  });
  grpc::ClientContext context;
  auto reader = loopback.Generate(&context);
  v1::GenerateResponse response;
  uint32_t messages = 0;
  uint32_t tokens = 0;
  for (; reader->Read(&response); ++messages) {
    for (const uint32_t token : response.chunk().tokens().token_ids()) EXPECT_EQ(token, tokens++);
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(tokens, kTokens);
  EXPECT_LE(messages, 2u) << "one in flight when the rest was written, one for the rest";
}

TEST(StreamWriterTest, CancelReachesTheProducerOnce) {
  std::shared_ptr<Writer> writer;
  absl::Notification started;
  absl::Notification cancelled;  // a second Notify would abort
  Loopback loopback([&](grpc::CallbackServerContext* context, const v1::GenerateRequest&) {
    writer = Writer::Start(context, {.on_cancel = [&] { cancelled.Notify(); }});
    started.Notify();
    return writer;
  });
  grpc::ClientContext context;
  auto reader = loopback.Generate(&context);
  started.WaitForNotification();
  EXPECT_EQ(writer->Write(Chunk(1)), WriteResult::kQueued);
  context.TryCancel();
  ASSERT_TRUE(cancelled.WaitForNotificationWithTimeout(absl::Seconds(10)));
  EXPECT_TRUE(writer->closed());
  EXPECT_EQ(writer->Write(Chunk(2)), WriteResult::kClosed);
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST(StreamWriterTest, PassedDeadlineIsACancel) {
  absl::Notification cancelled;
  Loopback loopback([&](grpc::CallbackServerContext* context, const v1::GenerateRequest&) {
    return Writer::Start(context, {.on_cancel = [&] { cancelled.Notify(); }});
  });
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(50));
  auto reader = loopback.Generate(&context);
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(cancelled.WaitForNotificationWithTimeout(absl::Seconds(10)));
}

// Cancellation at every moment of a stream's life, from a fixed seed; sanitizers judge.
TEST(StreamWriterTest, SurvivesCancelRacingWithWritesAndFinish) {
  std::atomic<int> live{0};
  Loopback loopback([&](grpc::CallbackServerContext* context, const v1::GenerateRequest&) {
    ++live;
    auto guard = std::shared_ptr<void>(nullptr, [&live](void*) { --live; });
    // A circle, as a producer makes that holds the writer and is held by its callback.
    auto producer = std::make_shared<std::shared_ptr<Writer>>();
    auto writer = Writer::Start(context, {.on_cancel = [guard, producer] {}});
    *producer = writer;
    std::thread([writer] {
      for (uint32_t i = 0; i < 50; ++i) {
        if (writer->Write(Chunk(i, 1000)) == WriteResult::kClosed) break;
      }
      writer->Finish(absl::OkStatus());
    }).detach();
    return writer;
  });
  std::mt19937 random(20240607);
  for (int round = 0; round < 200; ++round) {
    grpc::ClientContext context;
    auto reader = loopback.Generate(&context);
    v1::GenerateResponse response;
    const int reads = static_cast<int>(random() % 60);
    for (int i = 0; i < reads && reader->Read(&response); ++i) {
    }
    context.TryCancel();
    const grpc::StatusCode code = reader->Finish().error_code();
    EXPECT_TRUE(code == grpc::StatusCode::OK || code == grpc::StatusCode::CANCELLED) << code;
  }
  for (int i = 0; i < 1000 && live > 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(live, 0) << "callbacks must be released when a stream is done";
}

}  // namespace
}  // namespace isobit
