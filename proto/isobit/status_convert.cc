// Converts statuses. The codes of both types are equal by definition, so a cast maps them.
#include "proto/isobit/status_convert.h"

#include <string>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/base/shorten.h"

namespace isobit {
namespace {

constexpr char kRetryAfterUrl[] = "isobit/retry-after-ms";
constexpr size_t kMaxMessageSize = 2048;

std::optional<std::chrono::milliseconds> ParseDelay(absl::string_view text) {
  int64_t milliseconds = 0;
  if (!absl::SimpleAtoi(text, &milliseconds) || milliseconds < 0) return std::nullopt;
  return std::chrono::milliseconds(milliseconds);
}

}  // namespace

absl::Status WithRetryAfter(absl::Status status, std::chrono::milliseconds delay) {
  status.SetPayload(kRetryAfterUrl, absl::Cord(absl::StrCat(delay.count())));
  return status;
}

std::optional<std::chrono::milliseconds> RetryAfter(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kRetryAfterUrl);
  if (!payload) return std::nullopt;
  std::string text;
  absl::CopyCordToString(*payload, &text);
  return ParseDelay(text);
}

absl::Status Annotate(const absl::Status& status, absl::string_view prefix) {
  if (status.ok()) return status;
  absl::Status result(status.code(), absl::StrCat(prefix, ": ", status.message()));
  if (const auto delay = RetryAfter(status)) result = WithRetryAfter(std::move(result), *delay);
  return result;
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()),
                      Shorten(absl::StrCat(status.message()), kMaxMessageSize));
}

grpc::Status ToGrpcStatus(const absl::Status& status, grpc::ServerContextBase& context) {
  if (const auto delay = RetryAfter(status)) {
    context.AddTrailingMetadata(kRetryAfterKey, absl::StrCat(delay->count()));
  }
  return ToGrpcStatus(status);
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

absl::Status FromGrpcStatus(const grpc::Status& status, const grpc::ClientContext& context) {
  absl::Status result = FromGrpcStatus(status);
  if (result.ok()) return result;
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto hint = trailers.find(kRetryAfterKey);
  if (hint == trailers.end()) return result;
  const auto delay = ParseDelay(absl::string_view(hint->second.data(), hint->second.size()));
  return delay ? WithRetryAfter(std::move(result), *delay) : result;
}

}  // namespace isobit
