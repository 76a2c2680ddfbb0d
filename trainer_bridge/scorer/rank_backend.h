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
#include "kernels/ops.h"

namespace isobit::scorer {

// The two makers of ShardRanksOptions, which says what they do.
struct RankBackend {
  std::function<absl::StatusOr<std::unique_ptr<Ops>>(int local_rank)> make_ops;
  std::function<absl::StatusOr<std::unique_ptr<BlockGather>>(int local_rank, Ops& ops,
                                                             size_t block_bytes)>
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
