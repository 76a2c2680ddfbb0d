// Whether the caller of a request still waits for its result.
#ifndef ISOBIT_COMMON_BASE_AWAITED_H_
#define ISOBIT_COMMON_BASE_AWAITED_H_

#include <functional>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace isobit {

// Returns true once no caller waits any more, and true ever after. Thread-safe. Null: the caller
// always waits.
using IsAbandoned = std::function<bool()>;

// CANCELLED if no caller waits for `what` any more, for instance "pause".
inline absl::Status CheckAwaited(const IsAbandoned& is_abandoned, absl::string_view what) {
  if (!is_abandoned || !is_abandoned()) return absl::OkStatus();
  return absl::CancelledError(absl::StrCat("the caller of the ", what, " has gone"));
}

}  // namespace isobit

#endif  // ISOBIT_COMMON_BASE_AWAITED_H_
