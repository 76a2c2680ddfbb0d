// From ncclResult_t to a status, and the environment variables that NCCL reads.
#include "common/parallel/nccl_status.h"

#include <cstdlib>
#include <mutex>
#include <string>

#include "absl/strings/str_cat.h"

namespace isobit {

absl::Status NcclStatus(ncclResult_t result, const char* what, ncclComm_t comm) {
  if (result == ncclSuccess || result == ncclInProgress) return absl::OkStatus();
  const char* const detail = ncclGetLastError(comm);
  const std::string message = absl::StrCat(what, ": ", ncclGetErrorString(result), ", ",
                                           detail != nullptr ? detail : "no details");
  return result == ncclRemoteError || result == ncclSystemError ? absl::UnavailableError(message)
                                                                : absl::InternalError(message);
}

void SetNcclEnvironment() {
  static std::once_flag once;
  std::call_once(once, [] {
    // No multicast in the switches (NVLink SHARP): it helps sums, whose order our own kernels fix,
    // and gathers of blocks fill the links without it; its objects can fail to set up where hosts
    // are shared.
    // NCCL_RUNTIME_CONNECT stays as it is: a trainer that sends weights must have the same.
    setenv("NCCL_NVLS_ENABLE", "0", /*overwrite=*/0);
  });
}

}  // namespace isobit
