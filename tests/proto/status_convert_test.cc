// Statuses cross the wire border with code, message and retry hint, and messages stay small.
#include "proto/isobit/status_convert.h"

#include <string>

#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace isobit {
namespace {

using std::chrono::milliseconds;
using testing_support::StatusIs;

TEST(StatusConvertTest, KeepsEveryCodeAndMessage) {
  for (int code = 1; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), "what happened");
    const grpc::Status wire = ToGrpcStatus(status);
    EXPECT_EQ(wire.error_code(), code);
    EXPECT_EQ(FromGrpcStatus(wire), status);
  }
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
  ISOBIT_EXPECT_OK(FromGrpcStatus(grpc::Status::OK));
}

TEST(StatusConvertTest, CutsLongMessages) {
  const grpc::Status wire = ToGrpcStatus(absl::InternalError(std::string(100000, 'x')));
  EXPECT_EQ(wire.error_message(), std::string(2048, 'x') + "... (100000 bytes)");
}

TEST(StatusConvertTest, RetryHintIsReadBackAndSurvivesAnnotation) {
  const absl::Status plain = absl::ResourceExhaustedError("queue full");
  EXPECT_EQ(RetryAfter(plain), std::nullopt);
  const absl::Status hinted = WithRetryAfter(plain, milliseconds(250));
  EXPECT_EQ(RetryAfter(hinted), milliseconds(250));

  const absl::Status annotated = Annotate(hinted, "rollout");
  EXPECT_THAT(annotated, StatusIs(absl::StatusCode::kResourceExhausted, "rollout: queue full"));
  EXPECT_EQ(RetryAfter(annotated), milliseconds(250));
  ISOBIT_EXPECT_OK(Annotate(absl::OkStatus(), "rollout"));
}

}  // namespace
}  // namespace isobit
