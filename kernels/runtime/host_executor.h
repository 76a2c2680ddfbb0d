// A rank that computes in host memory, by the CPU backend or its scalar definition.
#ifndef ISOBIT_KERNELS_RUNTIME_HOST_EXECUTOR_H_
#define ISOBIT_KERNELS_RUNTIME_HOST_EXECUTOR_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "kernels/backend.h"
#include "kernels/runtime/rank_executor.h"

namespace isobit {

using MakeHostOps = std::function<std::unique_ptr<Backend>()>;

// `make_ops` makes a backend in host memory; called once for each rank. kv_bytes: bound of all
// ranks' KV caches together, for CacheThatFits. make_variant_ops makes the variant pass's backend,
// which reads weights as make_ops packs them; null: no variant. Depth is 1: Launch computes.
MakeRank MakeHostRank(MakeHostOps make_ops, int64_t kv_bytes = 0,
                      MakeHostOps make_variant_ops = nullptr);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_HOST_EXECUTOR_H_
