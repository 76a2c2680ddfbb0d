// A rank that computes in host memory: on the CPU backend, or its scalar definition.
#ifndef ISOBIT_KERNELS_RUNTIME_HOST_EXECUTOR_H_
#define ISOBIT_KERNELS_RUNTIME_HOST_EXECUTOR_H_

#include <functional>
#include <memory>

#include "kernels/runtime/rank_executor.h"

namespace isobit {

// `make_ops`: a backend in host memory, called once for each rank. Depth 1: Launch computes.
// RESOURCE_EXHAUSTED: the KV cache does not fit.
MakeRank MakeHostRank(std::function<std::unique_ptr<Ops>()> make_ops);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_HOST_EXECUTOR_H_
