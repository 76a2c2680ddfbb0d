// Options of the ranks of one engine: their GPUs, and how they reach each other.
#ifndef ISOBIT_KERNELS_RUNTIME_CUDA_RANK_OPTIONS_H_
#define ISOBIT_KERNELS_RUNTIME_CUDA_RANK_OPTIONS_H_

#include <cstdint>
#include <vector>

#include "absl/time/time.h"
#include "kernels/cuda/common/step_tables/shared_splits.h"

namespace isobit {

// With half as many rows, computing a step in halves costs more time than it hides
// (docs/lab/collectives.md).
inline constexpr int64_t kOverlapRows = 2048;

struct CudaRankOptions {
  std::vector<int> devices;  // rank r runs on devices[r], which it has to itself
  // Whether ranks access each other's memory directly; otherwise they exchange everything by NCCL.
  // Changes speed, never a bit. The sums of mode vanilla use NCCL in both cases.
  bool peer_memory = true;
  // Steps of at least so many rows are computed in two halves, so that the sums of one half travel
  // while the other is computed (sm90/collective/copy_engine_sum.h). Changes speed, never a bit.
  int64_t overlap_rows = kOverlapRows;
  // cuda::PushOptions: up to so many rows per step, row-parallel layers push their partial sums;
  // the second is the bandwidth, in bytes per microsecond, by which these layers choose their
  // tiles. Both change speed, never a bit.
  int64_t push_rows = -1;
  double push_bytes_per_us = -1;
  // Whether attention computes what sequences share only once
  // (cuda/common/step_tables/shared_splits.h), where that pays off. Changes speed, never a bit.
  cuda::Sharing sharing = cuda::Sharing::kWhereItPays;
  bool use_graphs = true;
  // Whether there is a variant pass (RankExecutor::has_variant), beside mode tree.
  // Its copy of the linear layers takes about as much memory as they do.
  bool variant = false;
  // The most guesses of a sequence in a step. If above 0, steps with guesses have graphs, too.
  int max_guesses = 0;
  double memory_fraction = 0.9;  // share of each GPU's free memory for the ranks, in (0, 1]
  absl::Duration peer_timeout = absl::Seconds(2);  // how long a rank waits for a peer in a step
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_CUDA_RANK_OPTIONS_H_
