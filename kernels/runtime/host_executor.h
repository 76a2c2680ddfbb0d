// A rank that computes in host memory: on the CPU backend, or its scalar definition.
#ifndef ISOBIT_KERNELS_RUNTIME_HOST_EXECUTOR_H_
#define ISOBIT_KERNELS_RUNTIME_HOST_EXECUTOR_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "kernels/runtime/rank_executor.h"

namespace isobit {

using MakeHostOps = std::function<std::unique_ptr<Ops>()>;

// `make_ops`: a backend in host memory, called once for each rank. kv_bytes: what the KV caches of
// all ranks together may take, for KvPagesThatFit. make_fast_ops: of the fast path, which reads
// weights as make_ops packs them; null: there is none. Depth 1: Launch computes.
MakeRank MakeHostRank(MakeHostOps make_ops, int64_t kv_bytes = 0,
                      MakeHostOps make_fast_ops = nullptr);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_HOST_EXECUTOR_H_
