// Which arithmetic a service computes with, by name. What each mode does is in docs/NUMERICS.md and
// kernels/contract.
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
      2,  // split count follows the batch, ring-order bf16 all-reduce: what an ordinary engine does
};

// "tree", "batch_invariant", "vanilla": flags, logs and the fingerprint use these names.
const char* NumericsModeName(NumericsMode mode);

// INVALID_ARGUMENT: another name.
absl::StatusOr<NumericsMode> ParseNumericsMode(absl::string_view name);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CONFIG_NUMERICS_MODE_H_
