// What the ranks of one engine share on their GPUs: the memory through which they draw together,
// and the means by which they sum. Made once, before the ranks' threads start jobs. Not here: what
// a step does with it (cuda_executor.cc).
#ifndef ISOBIT_KERNELS_RUNTIME_CUDA_RANK_GROUP_H_
#define ISOBIT_KERNELS_RUNTIME_CUDA_RANK_GROUP_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/parallel/nccl_group.h"
#include "common/parallel/peer_group.h"
#include "common/parallel/thread_barrier.h"
#include "kernels/all_reduce.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/sm90/collective/all_reduce.h"
#include "kernels/cuda/sm90/collective/copy_engine_sum.h"
#include "kernels/runtime/cuda_rank_options.h"
#include "kernels/runtime/rank_exchange.h"
#include "kernels/runtime/rank_executor.h"
#include "kernels/runtime/step_draws.h"

namespace isobit {

struct CudaRankGroup {
  // `rank`: any rank's options. Errors: those of MakeCudaRank.
  static absl::StatusOr<std::shared_ptr<CudaRankGroup>> Create(const CudaRankOptions& options,
                                                               const RankOptions& rank);

  // This rank's end of the sum over ranks in rank.mode; null with one rank. `ops`, of the rank and
  // that mode, and the group outlive it.
  absl::StatusOr<std::unique_ptr<AllReduce>> MakeAllReduce(const RankOptions& rank,
                                                           CudaBackend& ops) const;
  // The buffers through which the rank draws. `device`, the rank's, and the group outlive it.
  absl::StatusOr<std::unique_ptr<RankExchange>> MakeExchange(int rank, CudaDevice& device) const;

  // Whether NCCL computes the sums of that mode.
  bool SumsByNccl(NumericsMode mode) const {
    return !nccl.empty() && (mode == NumericsMode::kVanilla || peers.empty());
  }

  // Ends the ranks' waits in NCCL, and their threads' waits for each other.
  void Abort(const absl::Status& reason) const;

  size_t bytes_of_rank() const;  // the size, on each GPU, of the memory that ranks share

  DrawShape draw_shape;
  std::vector<size_t> free_bytes;  // by rank: of its GPU, before the group allocated any
  std::vector<std::unique_ptr<cuda::PeerAllReduce>>
      peers;                                     // by rank; empty: one rank, or only NCCL
  std::vector<std::unique_ptr<NcclGroup>> nccl;  // by rank; empty: not used
  PeerBuffers exchanged;                         // not if only NCCL is used
  PeerMemory halves;                             // of CopyEngineSum; only if there is a barrier
  std::unique_ptr<ThreadBarrier> barrier;        // null: no step is computed in halves
  int64_t overlap_rows = 0;                      // CudaRankOptions::overlap_rows

 private:
  static cuda::CopyEngineSumOptions HalvesOf(const RankOptions& rank);
  absl::Status MapMemory(const CudaRankOptions& options, const RankOptions& rank);
  absl::Status ConnectNccl(const CudaRankOptions& options);
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_CUDA_RANK_GROUP_H_
