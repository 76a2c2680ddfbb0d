// The arithmetic that a service uses, by name. docs/NUMERICS.md and kernels/contract define what
// each mode computes.
#ifndef ISOBIT_COMMON_CONFIG_NUMERICS_MODE_H_
#define ISOBIT_COMMON_CONFIG_NUMERICS_MODE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace isobit {

// Part of the fingerprint.
enum class NumericsMode : int32_t {
  kTree = 0,            // the contract
  kBatchInvariant = 1,  // ranks add bf16 in rank order: equal across batches, not across TP sizes
  kVanilla =
      2,  // the batch decides the split count, ring-order bf16 all-reduce: as an ordinary engine
};

// "tree", "batch_invariant", "vanilla": flags, logs and the fingerprint use these names.
const char* NumericsModeName(NumericsMode mode);

// INVALID_ARGUMENT: another name.
absl::StatusOr<NumericsMode> ParseNumericsMode(absl::string_view name);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CONFIG_NUMERICS_MODE_H_
