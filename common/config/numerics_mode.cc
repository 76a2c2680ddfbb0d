// Names of the numerics modes. See numerics_mode.h.
#include "common/config/numerics_mode.h"

#include "absl/strings/str_cat.h"

namespace isobit {

const char* NumericsModeName(NumericsMode mode) {
  switch (mode) {
    case NumericsMode::kTree:
      return "tree";
    case NumericsMode::kBatchInvariant:
      return "batch_invariant";
    case NumericsMode::kVanilla:
      return "vanilla";
  }
  return "unknown";
}

absl::StatusOr<NumericsMode> ParseNumericsMode(absl::string_view name) {
  for (const NumericsMode mode :
       {NumericsMode::kTree, NumericsMode::kBatchInvariant, NumericsMode::kVanilla}) {
    if (name == NumericsModeName(mode)) return mode;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("numerics mode: expected tree, batch_invariant or vanilla, got \"", name, "\""));
}

}  // namespace isobit
