// Everything that a service uses of CUDA. cuda_backend.cc defines it in a build with CUDA; in a
// build without, cuda_backend_absent.cc does, and every function fails with UNIMPLEMENTED.
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
#include "kernels/runtime/rank_backend.h"
#include "kernels/runtime/rank_executor.h"

namespace isobit {

// Ranks of the rollout, which run steps. Making a rank can fail as in MakeCudaRank
// (kernels/runtime/cuda_executor.h).
absl::StatusOr<MakeRank> MakeCudaRanks(const CudaRankOptions& options);

// The free memory of a GPU, in bytes.
absl::StatusOr<int64_t> FreeGpuBytes(int device);

struct CudaBackendOptions {
  NumericsMode numerics = NumericsMode::kTree;
  std::vector<int> devices;                    // CUDA ordinals of this process's ranks, each once
  int num_shards = 1;                          // ranks in all processes
  int first_rank = 0;                          // the first rank of this process
  std::string nccl_id{};                       // the group's; empty: only this process has ranks
  std::chrono::milliseconds timeout{120'000};  // of every wait for another rank
};

// The scorer's backend: one GPU per rank, blocks gathered by NCCL. FAILED_PRECONDITION: a device
// does not exist or is not Hopper.
absl::StatusOr<RankBackend> MakeCudaBackend(const CudaBackendOptions& options);

// Joins a trainer's NCCL group, in order to receive on that device.
JoinWeightBroadcast JoinNcclBroadcast(int device);

// Makes the id of a group of ranks in several processes, for CudaBackendOptions::nccl_id.
absl::StatusOr<std::string> NewGroupId();

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_CUDA_BACKEND_H_
