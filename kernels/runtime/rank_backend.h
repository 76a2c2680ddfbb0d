// Where the scorer's ranks compute: which backend a rank gets, and what gathers its blocks.
#ifndef ISOBIT_KERNELS_RUNTIME_RANK_BACKEND_H_
#define ISOBIT_KERNELS_RUNTIME_RANK_BACKEND_H_

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "common/parallel/block_gather.h"
#include "kernels/host_device.h"
#include "kernels/ops.h"

namespace isobit {

// Makes what the ranks of this process compute with; `local_rank` counts from 0. All backends of
// one scorer give equal layouts of packed weights.
struct RankBackend {
  // Of one rank, for its passes.
  std::function<absl::StatusOr<std::unique_ptr<Ops>>(int local_rank)> make_ops;
  // Where the ops of a rank find a version of the weights. Called for each version, so that filling
  // its memory does not disturb passes.
  std::function<absl::StatusOr<std::unique_ptr<Device>>(int local_rank)> make_device =
      [](int) -> absl::StatusOr<std::unique_ptr<Device>> { return std::make_unique<HostDevice>(); };
  // What gathers blocks of at most `block_bytes` for the ops of a rank; called after make_ops, for
  // all ranks concurrently, if there is more than one. Null: all ranks are threads of this process
  // and compute in host memory.
  std::function<absl::StatusOr<std::unique_ptr<BlockGather>>(int local_rank, size_t block_bytes)>
      make_gather = nullptr;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_RANK_BACKEND_H_
