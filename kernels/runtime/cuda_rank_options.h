// What the ranks of one engine are told about their GPUs and about each other.
#ifndef ISOBIT_KERNELS_RUNTIME_CUDA_RANK_OPTIONS_H_
#define ISOBIT_KERNELS_RUNTIME_CUDA_RANK_OPTIONS_H_

#include <cstdint>
#include <vector>

#include "absl/time/time.h"
#include "kernels/cuda/shared_splits.h"

namespace isobit {

// With half as many rows, computing a step in halves costs more than it hides
// (docs/lab/collectives.md).
inline constexpr int64_t kOverlapRows = 2048;

struct CudaRankOptions {
  std::vector<int> devices;  // rank r runs on devices[r], alone
  // Whether ranks reach each other's memory directly; else NCCL carries all that they exchange. It
  // changes speed, never a bit. Vanilla's sums are NCCL's either way.
  bool peer_memory = true;
  // Least rows of a step that is computed in two halves, so that the sums of one travel while the
  // other is computed (collective/copy_engine_sum.h). It changes speed, never a bit.
  int64_t overlap_rows = kOverlapRows;
  // Most rows of a step whose row-parallel layers push their partial sums, and the bytes a
  // microsecond by which these layers choose their tiles (cuda::PushOptions). They change speed,
  // never a bit.
  int64_t push_rows = -1;
  double push_bytes_per_us = -1;
  // Whether attention computes what sequences share once (cuda/shared_splits.h), where that pays.
  // It changes speed, never a bit.
  cuda::Sharing sharing = cuda::Sharing::kWhereItPays;
  bool use_graphs = true;
  // Whether steps may be computed by the fast path (ModelStep::fast), in mode vanilla beside mode
  // tree. Its copy of the linear layers takes about as much memory as they do.
  bool fast_path = false;
  // Most guesses of a sequence in a step. Above 0, steps with guesses have graphs, too.
  int max_guesses = 0;
  double memory_fraction = 0.9;  // of each GPU's free memory that the ranks may take, in (0, 1]
  absl::Duration peer_timeout = absl::Seconds(2);  // how long a rank waits for a peer in a step
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_CUDA_RANK_OPTIONS_H_
