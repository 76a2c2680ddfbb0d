// LLM-42's scheme (docs/architecture/speculation.md). Sequences decode on a fast path that promises
// no bits. The tokens that it draws for deterministic requests are candidates. A step of the
// contract later verifies windows of several sequences together. A candidate that the contract
// would not have drawn is rolled back, with all candidates behind it.
//
// This header has the options and the counts. The scheduler decides which steps are fast and which
// windows are verified; step pipeline and request table keep candidates apart from tokens.
#ifndef ISOBIT_ROLLOUT_SCHEDULE_FAST_PATH_H_
#define ISOBIT_ROLLOUT_SCHEDULE_FAST_PATH_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "common/config/numerics_mode.h"

namespace isobit {

// The numerics of the fast path.
inline constexpr NumericsMode kFastPathMode = NumericsMode::kVanilla;

inline constexpr size_t kMaxVerifyWindow = 1024;
inline constexpr size_t kMaxVerifyGroup = 1024;

struct FastPathOptions {
  // Rows of a sequence in a verification: its last token and window - 1 candidates, at least 1.
  // 0: there is no fast path.
  size_t window = 0;
  size_t group = 1;  // sequences to verify together, if so many are ready
  bool is_on() const { return window > 0; }
};

// Counts since the start. One thread writes them, any may read them.
struct FastPathCounts {
  std::atomic<int64_t> steps = 0;       // computed by the fast path
  std::atomic<int64_t> windows = 0;     // verified
  std::atomic<int64_t> rollbacks = 0;   // windows with a wrong candidate
  std::atomic<int64_t> verified = 0;    // candidates that became tokens
  std::atomic<int64_t> recomputed = 0;  // candidates that were dropped
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_SCHEDULE_FAST_PATH_H_
