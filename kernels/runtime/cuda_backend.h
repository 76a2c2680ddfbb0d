// All that a service takes from CUDA. Defined twice: by cuda_backend.cc in a build with CUDA, and
// by cuda_backend_absent.cc in one without, where everything here fails with UNIMPLEMENTED.
#ifndef ISOBIT_KERNELS_RUNTIME_CUDA_BACKEND_H_
#define ISOBIT_KERNELS_RUNTIME_CUDA_BACKEND_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/config/numerics_mode.h"
#include "common/parallel/weight_broadcast.h"
#include "kernels/runtime/cuda_rank_options.h"
#include "kernels/runtime/fault_injector.h"
#include "kernels/runtime/rank_backend.h"
#include "kernels/runtime/rank_executor.h"

namespace isobit {

// Of the rollout: ranks that run steps. Errors at the making of a rank as MakeCudaRank's
// (kernels/runtime/cuda_executor.h).
absl::StatusOr<MakeRank> MakeCudaRanks(const CudaRankOptions& options, const InjectedFault& fault);

// Memory of a GPU that nobody has taken, in bytes.
absl::StatusOr<int64_t> FreeGpuBytes(int device);

struct CudaBackendOptions {
  NumericsMode numerics = NumericsMode::kTree;
  std::vector<int> devices;                    // CUDA ordinals of this process's ranks, each once
  int num_shards = 1;                          // ranks of all processes
  int first_rank = 0;                          // of this process
  std::string nccl_id{};                       // the group's; empty: it lies in this process alone
  std::chrono::milliseconds timeout{120'000};  // of what waits for another rank
};

// Of the scorer: one GPU a rank, blocks gathered by NCCL. FAILED_PRECONDITION: a device that is not
// there or not Hopper.
absl::StatusOr<RankBackend> MakeCudaBackend(const CudaBackendOptions& options);

// Joins a trainer's NCCL group, to receive on that device.
JoinWeightBroadcast JoinNcclBroadcast(int device);

// Names a group of ranks of several processes, for CudaBackendOptions::nccl_id.
absl::StatusOr<std::string> NewGroupId();

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_CUDA_BACKEND_H_
