// The check of a number of ranks.
#include "common/base/rank_count.h"

#include "absl/strings/str_cat.h"

namespace isobit {

absl::Status CheckRankCount(absl::string_view what, int64_t count) {
  for (int64_t size = 1; size <= kMaxRanks; size *= 2) {
    if (count == size) return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(what, ": expected ", kRankCounts, ", got ", count));
}

}  // namespace isobit
