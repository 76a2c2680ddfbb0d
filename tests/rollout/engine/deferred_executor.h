// A rank of depth 2 for tests: wraps another executor and computes each step as late as possible.
#ifndef ISOBIT_TESTS_ROLLOUT_ENGINE_DEFERRED_EXECUTOR_H_
#define ISOBIT_TESTS_ROLLOUT_ENGINE_DEFERRED_EXECUTOR_H_

#include "kernels/runtime/rank_executor.h"

namespace isobit {

// Wraps a rank of depth 1. Launch only stores the step. Collect fills in the tokens that the step
// before has drawn and computes the step; it fails the test if the step, or what it points to, has
// changed since its launch. FAILED_PRECONDITION: a call breaks the rules of RankExecutor.
MakeRank MakeDeferredRank(MakeRank make_rank);

}  // namespace isobit

#endif  // ISOBIT_TESTS_ROLLOUT_ENGINE_DEFERRED_EXECUTOR_H_
