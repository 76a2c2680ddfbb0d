// A rank that computes on a GPU. Steps of one new token a sequence replay CUDA graphs, captured at
// start for a ladder of batch sizes; drawn tokens feed the next step on the GPU, so the host is one
// step behind (depth 2).
#ifndef ISOBIT_KERNELS_CUDA_CUDA_EXECUTOR_H_
#define ISOBIT_KERNELS_CUDA_CUDA_EXECUTOR_H_

#include <cstdint>
#include <vector>

#include "absl/time/time.h"
#include "kernels/model/rank_executor.h"

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
  bool use_graphs = true;
  absl::Duration peer_timeout = absl::Seconds(2);  // how long a rank waits for a peer in a step
  // For tests: rank `fault_rank` fails on the GPU in its step number `fault_step`. -1: never.
  int fault_rank = -1;
  int64_t fault_step = 0;
};

// All ranks of one engine come from one such function. Errors at the making of a rank: devices are
// not as many as the ranks, each another, or the vocabulary is beyond kMaxDeviceVocab of
// log_probs/log_probs.h (INVALID_ARGUMENT); devices are absent, not Hopper or unable to map each
// other's memory (FAILED_PRECONDITION), full (RESOURCE_EXHAUSTED).
MakeRank MakeCudaRank(const CudaRankOptions& options);

// The largest decode step that is captured. Beyond it launches cost little beside a step, and
// graphs would go on taking time at start and memory.
inline constexpr int64_t kMaxGraphSequences = 512;

// Batch sizes for which decode graphs are captured, ascending: steps in between are padded, larger
// ones run without a graph.
std::vector<int64_t> GraphLadder(int64_t max_sequences);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_CUDA_CUDA_EXECUTOR_H_
