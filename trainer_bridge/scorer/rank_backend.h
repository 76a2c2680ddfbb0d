// Where the scorer's ranks compute: which backend a rank gets, and what gathers its blocks.
#ifndef ISOBIT_TRAINER_BRIDGE_SCORER_RANK_BACKEND_H_
#define ISOBIT_TRAINER_BRIDGE_SCORER_RANK_BACKEND_H_

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/config/numerics_mode.h"
#include "common/parallel/block_gather.h"
#include "kernels/host_device.h"
#include "kernels/ops.h"

namespace isobit::scorer {

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

struct CudaBackendOptions {
  NumericsMode numerics = NumericsMode::kTree;
  std::vector<int> devices;                    // CUDA ordinals of this process's ranks, each once
  int num_shards = 1;                          // ranks of all processes
  int first_rank = 0;                          // of this process
  std::string nccl_id{};                       // the group's; empty: it lies in this process alone
  std::chrono::milliseconds timeout{120'000};  // of what waits for another rank
};

// Names a group of ranks of several processes, for CudaBackendOptions::nccl_id. UNIMPLEMENTED: the
// binary was built without CUDA.
absl::StatusOr<std::string> NewGroupId();

// One GPU a rank, blocks gathered by NCCL. UNIMPLEMENTED: the binary was built without CUDA.
// FAILED_PRECONDITION: a device that is not there or not Hopper.
absl::StatusOr<RankBackend> MakeCudaBackend(const CudaBackendOptions& options);

}  // namespace isobit::scorer

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_RANK_BACKEND_H_
