// LLM-42's scheme (docs/architecture/speculation.md): sequences decode on a fast path that promises
// no bits; what it draws for those that must be deterministic are candidates, until windows of
// several sequences are verified together in a step of the contract. A candidate that the contract
// would not have drawn is rolled back, with all behind it.
//
// Here are the options and the counts. The scheduler decides which steps are fast and which windows
// are verified; the step pipeline and the request table keep candidates apart from tokens.
#ifndef ISOBIT_ROLLOUT_FAST_PATH_H_
#define ISOBIT_ROLLOUT_FAST_PATH_H_

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
  size_t group = 1;  // sequences that are verified together, if there are as many
  bool is_on() const { return window > 0; }
};

// Since the start. Written by one thread, read by any.
struct FastPathCounts {
  std::atomic<int64_t> steps = 0;       // that the fast path computed
  std::atomic<int64_t> windows = 0;     // that were verified
  std::atomic<int64_t> rollbacks = 0;   // of them, those with a wrong candidate
  std::atomic<int64_t> verified = 0;    // candidates that became tokens
  std::atomic<int64_t> recomputed = 0;  // candidates that were dropped
};

}  // namespace isobit

#endif  // ISOBIT_ROLLOUT_FAST_PATH_H_
