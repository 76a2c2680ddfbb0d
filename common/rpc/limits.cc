// Checks a request's size, between our limit and gRPC's.
#include "common/rpc/limits.h"

#include "absl/strings/str_cat.h"

namespace isobit {

absl::Status CheckRequestSize(const google::protobuf::MessageLite& request) {
  const size_t size = request.ByteSizeLong();
  if (size <= kMaxRequestBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(request.GetTypeName(), ": ", size,
                                                 " bytes, expected at most ", kMaxRequestBytes));
}

}  // namespace isobit
