// Converts between absl::Status, which the code uses, and grpc::Status, which the wire uses. A
// retry hint is a payload of the former, and trailing metadata beside the latter.
#ifndef ISOBIT_PROTO_ISOBIT_STATUS_CONVERT_H_
#define ISOBIT_PROTO_ISOBIT_STATUS_CONVERT_H_

#include <grpcpp/client_context.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include <chrono>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace isobit {

// The trailing metadata key of a retry hint; its value is milliseconds in decimal.
inline constexpr char kRetryAfterKey[] = "retry-after-ms";

// `status`, not OK, with the hint that a retry may succeed after `delay`.
absl::Status WithRetryAfter(absl::Status status, std::chrono::milliseconds delay);

// The hint that `status` carries, if any.
std::optional<std::chrono::milliseconds> RetryAfter(const absl::Status& status);

// `status` with "`prefix`: " before its message; code and retry hint stay. OK stays OK.
absl::Status Annotate(const absl::Status& status, absl::string_view prefix);

// Same code and message; a message over 2 KiB is cut, since gRPC drops a call whose trailers exceed
// its metadata limit. The retry hint is lost: use the second form if there may be one.
grpc::Status ToGrpcStatus(const absl::Status& status);

// The same, and adds the retry hint to `context`'s trailing metadata. Call it once, just before
// Finish.
grpc::Status ToGrpcStatus(const absl::Status& status, grpc::ServerContextBase& context);

// Same code and message.
absl::Status FromGrpcStatus(const grpc::Status& status);

// The same, and reads the retry hint in `context`'s trailing metadata; the call must be over.
absl::Status FromGrpcStatus(const grpc::Status& status, const grpc::ClientContext& context);

}  // namespace isobit

#endif  // ISOBIT_PROTO_ISOBIT_STATUS_CONVERT_H_
