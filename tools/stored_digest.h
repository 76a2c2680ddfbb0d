// The digest that services reported before 2026-11-24: one of a checkpoint's bytes as they are
// stored, which changes with the dtype. It maps names in old logs to today's digests.
#ifndef ISOBIT_TOOLS_STORED_DIGEST_H_
#define ISOBIT_TOOLS_STORED_DIGEST_H_

#include <string>

#include "absl/status/statusor.h"
#include "common/checkpoint/tensor_source.h"

namespace isobit {

// SHA-256, 64 hex digits, over name, dtype, shape and bytes of all tensors, sorted by name. Errors:
// those of the source.
absl::StatusOr<std::string> StoredDigest(const TensorSource& source);

}  // namespace isobit

#endif  // ISOBIT_TOOLS_STORED_DIGEST_H_
