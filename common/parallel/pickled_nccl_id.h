// The id of an NCCL group in the form in which Python trainers pass it on: a pickle of a ctypes
// structure. A pickle is a program; it is never executed here.
#ifndef ISOBIT_COMMON_PARALLEL_PICKLED_NCCL_ID_H_
#define ISOBIT_COMMON_PARALLEL_PICKLED_NCCL_ID_H_

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace isobit {

inline constexpr size_t kNcclIdBytes = 128;  // of an ncclUniqueId

// Reads a pickle, of Python's protocol 3, 4 or 5, of a ctypes structure called ncclUniqueId without
// attributes, and returns its 128 bytes. The pickle must be exactly what Python writes for it.
// INVALID_ARGUMENT: it is not; the message names the first byte that differs.
absl::StatusOr<std::string> UnpickleNcclId(absl::string_view pickle);

}  // namespace isobit

#endif  // ISOBIT_COMMON_PARALLEL_PICKLED_NCCL_ID_H_
