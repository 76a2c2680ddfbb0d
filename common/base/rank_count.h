// How many ranks a group may have: the sum over ranks is a balanced tree of at most eight leaves
// (docs/NUMERICS.md C4).
#ifndef ISOBIT_COMMON_BASE_RANK_COUNT_H_
#define ISOBIT_COMMON_BASE_RANK_COUNT_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace isobit {

inline constexpr int kMaxRanks = 8;
inline constexpr char kRankCounts[] = "1, 2, 4 or 8";  // for help texts

// INVALID_ARGUMENT: `count` is not one of kRankCounts. The message names `what`, for instance
// "tensor-parallel size".
absl::Status CheckRankCount(absl::string_view what, int64_t count);

}  // namespace isobit

#endif  // ISOBIT_COMMON_BASE_RANK_COUNT_H_
