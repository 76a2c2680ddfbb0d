// What the ranks of one engine share on their GPUs: the memory through which they draw together,
// and the ways their sums take. Made once, before the ranks' threads start. Not here: what a step
// does with it (cuda_executor.cc).
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
#include "common/parallel/rank_meeting.h"
#include "kernels/all_reduce.h"
#include "kernels/cuda/collective/all_reduce.h"
#include "kernels/cuda/collective/copy_engine_sum.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/rows/step_kernels.h"
#include "kernels/runtime/cuda_rank_options.h"
#include "kernels/runtime/rank_executor.h"

namespace isobit {

struct CudaRankGroup {
  // `rank`: any rank's options. Errors: those of MakeCudaRank.
  static absl::StatusOr<std::shared_ptr<CudaRankGroup>> Create(const CudaRankOptions& options,
                                                               const RankOptions& rank);

  // The sum of this rank with the others; null with one rank. `ops`, of the rank, and the group
  // outlive it.
  absl::StatusOr<std::unique_ptr<AllReduce>> MakeAllReduce(const RankOptions& rank,
                                                           CudaOps& ops) const;

  // Ends what ranks wait for in NCCL, and their threads' waits for each other.
  void Abort(const absl::Status& reason) const;

  std::vector<std::unique_ptr<cuda::PeerAllReduce>>
      peers;                                     // by rank; empty: one rank, or NCCL alone
  std::vector<std::unique_ptr<NcclGroup>> nccl;  // by rank; empty: not in use
  PeerMemory logits;        // [max_sequences, the rank's columns] fp32; not with NCCL alone
  PeerMemory draws;         // [max_sequences] int32; likewise
  PeerMemory parts;         // LogProbPartBytes of max_sequences rows; likewise
  PeerMemory halves;        // of CopyEngineSum, if there is a meeting
  size_t shared_bytes = 0;  // of each rank, in the four
  std::unique_ptr<RankMeeting> meeting;  // null: no step is computed in halves
  cuda::RankColumns columns;             // of the vocabulary; pointers into `logits`
  int64_t widest = 0;                    // most columns of a rank
  int64_t overlap_rows = 0;              // CudaRankOptions::overlap_rows

 private:
  static cuda::CopyEngineSumOptions HalvesOf(const RankOptions& rank);
  absl::Status MapMemory(const CudaRankOptions& options, const RankOptions& rank);
  absl::Status ConnectNccl(const CudaRankOptions& options);
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_CUDA_RANK_GROUP_H_
