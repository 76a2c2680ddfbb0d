// A rank of depth 2 for tests: another executor, whose steps are computed as late as they may be.
#ifndef ISOBIT_TESTS_ROLLOUT_DEFERRED_EXECUTOR_H_
#define ISOBIT_TESTS_ROLLOUT_DEFERRED_EXECUTOR_H_

#include "kernels/runtime/rank_executor.h"

namespace isobit {

// Wraps a rank of depth 1. Launch only remembers the step; Collect computes it, with the fed ids
// put in, and fails the test if the step or what it points to is not as it was at its launch.
// FAILED_PRECONDITION from calls that break the rules of RankExecutor.
MakeRank MakeDeferredRank(MakeRank make_rank);

}  // namespace isobit

#endif  // ISOBIT_TESTS_ROLLOUT_DEFERRED_EXECUTOR_H_
