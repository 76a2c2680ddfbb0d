// What clients see of requests that cannot be read, over real connections.
#include "common/rpc/request_watch.h"

#include <grpcpp/client_context.h>
#include <grpcpp/impl/codegen/client_unary_call.h>
#include <grpcpp/support/byte_buffer.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/rpc/channel.h"
#include "common/rpc/limits.h"
#include "common/rpc/server_runner.h"
#include "gtest/gtest.h"
#include "isobit/v1/comparator.grpc.pb.h"
#include "isobit/v1/rollout.grpc.pb.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using grpc::StatusCode;

const char kMalformed[] = "\x0a\xff\xff\xff\xff\x07";

// The status of a call with `wire` as its request.
grpc::Status Call(grpc::Channel& channel, const std::string& path, const std::string& wire,
                  grpc_compression_algorithm compression = GRPC_COMPRESS_NONE) {
  const grpc::Slice slice(wire);
  const grpc::ByteBuffer request(&slice, 1);
  grpc::ByteBuffer response;
  grpc::ClientContext context;
  context.set_compression_algorithm(compression);
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  const grpc::internal::RpcMethod method(path.c_str(), grpc::internal::RpcMethod::NORMAL_RPC);
  return grpc::internal::BlockingUnaryCall<grpc::ByteBuffer, grpc::ByteBuffer>(
      &channel, method, &context, request, &response);
}

// Abort answers; the others are not implemented.
class Rollout final : public v1::RolloutService::CallbackService {
 public:
  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* context, const v1::AbortRequest*,
                                  v1::AbortResponse*) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }
};

// Record answers with the number of records.
class Comparator final : public v1::ComparatorService::CallbackService {
 public:
  grpc::ServerReadReactor<v1::RecordRequest>* Record(grpc::CallbackServerContext*,
                                                     v1::CompareSummary* summary) override {
    class Reader final : public grpc::ServerReadReactor<v1::RecordRequest> {
     public:
      explicit Reader(v1::CompareSummary* summary) : summary_(summary) { StartRead(&request_); }
      void OnReadDone(bool ok) override {
        if (!ok) return Finish(grpc::Status::OK);
        summary_->set_num_sequences(summary_->num_sequences() + 1);
        StartRead(&request_);
      }
      void OnDone() override { delete this; }

     private:
      v1::CompareSummary* const summary_;
      v1::RecordRequest request_;
    };
    return new Reader(summary);
  }
};

class RequestWatchTest : public testing::Test {
 protected:
  void SetUp() override {
    runner_.Register(&rollout_, v1::RolloutService::service_full_name());
    runner_.Register(&comparator_, v1::ComparatorService::service_full_name());
    ISOBIT_ASSERT_OK(runner_.Start());
    channel_ = MakeChannel(HostAndPort("127.0.0.1", runner_.port()));
  }

  grpc::Status Abort(const std::string& wire) {
    return Call(*channel_, "/isobit.v1.RolloutService/Abort", wire);
  }

  Rollout rollout_;
  Comparator comparator_;
  ServerRunner runner_{ServerOptions{}};
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(RequestWatchTest, SaysWhatCouldNotBeRead) {
  EXPECT_TRUE(Abort("").ok());
  const grpc::Status malformed = Abort(kMalformed);
  EXPECT_EQ(malformed.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(malformed.error_message(), testing::HasSubstr("isobit.v1.AbortRequest: malformed"));

  std::string many;
  for (int i = 0; i < 1 << 20; ++i) many.append("\x0a\x00", 2);
  const grpc::Status unbounded = Abort(many);
  EXPECT_EQ(unbounded.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(unbounded.error_message(),
              testing::HasSubstr("isobit.v1.AbortRequest: expected at most 524288 fields"));
}

TEST_F(RequestWatchTest, LeavesMethodsThatAreNotThereUnimplemented) {
  for (const char* method : {"GetLoad", "Boil"}) {
    const grpc::Status status =
        Call(*channel_, std::string("/isobit.v1.RolloutService/") + method, "");
    EXPECT_EQ(status.error_code(), StatusCode::UNIMPLEMENTED) << method;
  }
}

TEST_F(RequestWatchTest, AStreamEndsAtTheFirstRequestThatCannotBeRead) {
  const std::string path = "/isobit.v1.ComparatorService/Record";
  EXPECT_TRUE(Call(*channel_, path, "").ok());
  const grpc::Status status = Call(*channel_, path, kMalformed);
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), testing::HasSubstr("isobit.v1.RecordRequest: malformed"));
}

TEST_F(RequestWatchTest, ErrorsKeepToTheirCalls) {
  std::atomic<int> num_wrong = 0;
  std::vector<std::thread> callers;
  for (int t = 0; t < 8; ++t) {
    callers.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        const bool is_good = (i + t) % 3 != 0;
        num_wrong += Abort(is_good ? "" : kMalformed).ok() != is_good;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(num_wrong, 0);
}

TEST_F(RequestWatchTest, RefusesCompressedAndTooLargeRequests) {
  const grpc::Status compressed = Call(*channel_, "/isobit.v1.RolloutService/Abort",
                                       std::string(100000, '\0'), GRPC_COMPRESS_GZIP);
  EXPECT_EQ(compressed.error_code(), StatusCode::UNIMPLEMENTED);
  EXPECT_THAT(compressed.error_message(), testing::HasSubstr("gzip"));
  const grpc::Status large = Abort(std::string(kMaxRequestBytes + 1, 'x'));
  EXPECT_EQ(large.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(Abort("").ok()) << "and lives on";
}

}  // namespace
}  // namespace isobit
