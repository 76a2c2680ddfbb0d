// The id of an NCCL group in the form in which Python trainers pass it on: a pickle of a ctypes
// structure. A pickle is a program, which nobody runs here.
#ifndef ISOBIT_COMMON_PARALLEL_PICKLED_NCCL_ID_H_
#define ISOBIT_COMMON_PARALLEL_PICKLED_NCCL_ID_H_

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace isobit {

inline constexpr size_t kNcclIdBytes = 128;  // of an ncclUniqueId

// The 128 bytes of an instance of a ctypes structure called ncclUniqueId, without attributes,
// pickled by Python's protocol 3, 4 or 5. The pickle must consist of exactly that, in the order in
// which Python writes it. INVALID_ARGUMENT says at which byte it does not.
absl::StatusOr<std::string> UnpickleNcclId(absl::string_view pickle);

}  // namespace isobit

#endif  // ISOBIT_COMMON_PARALLEL_PICKLED_NCCL_ID_H_
