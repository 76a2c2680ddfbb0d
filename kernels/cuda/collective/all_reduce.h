// The sum over tensor-parallel ranks at the end of a row-parallel layer, through memory that the
// ranks' GPUs map, in one kernel with the residual stream's update and RMSNorm.
//
// The bits are those of LaunchReduce followed by LaunchRmsNorm (C4, C5) for every schedule
// (all_reduce_schedule.h). No host synchronisation and no NVLink multicast. Each rank's launches go
// to one stream or to streams in an order that events fix; all ranks launch the same operations of
// the same shapes in the same order, from any threads, also by replaying CUDA graphs. What the
// kernels keep between launches is in GPU memory.
//
// INVARIANT: a word of a mailbox is either empty or data of this operation
// (AllReduceTest.ReplaysWithDelays). Every word is its own flag: empty is a NaN that no rank sends.
// The reader empties what it has read. There are two mailboxes in turn, and no rank ends operation
// k before all have begun it: so who writes for operation k+2, be it the linear layer before it
// (Push), writes where its peers have emptied, in operation k, what they read there.
//
// A peer that does not come, for `timeout`, ends the wait of all ranks: see Check. Ranks may share
// a GPU (to test more ranks than there are GPUs), but then no rank may, between its operations,
// need the GPU to come to rest: another waits there for this one. Loading a kernel at its first
// launch does (CUDA_MODULE_LOADING=EAGER loads all at start), and so do cudaFree and streams that
// share a hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=32).
#ifndef ISOBIT_KERNELS_CUDA_COLLECTIVE_ALL_REDUCE_H_
#define ISOBIT_KERNELS_CUDA_COLLECTIVE_ALL_REDUCE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/parallel/peer_group.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/ops.h"

namespace isobit::cuda {

struct AllReduceOptions {
  int64_t hidden = 0;  // columns of a row, 1 .. kMaxAllReduceHidden
  // Of one kernel, up to 32768; more rows are several kernels, which costs 6 % at twice as many. A
  // rank's GPU holds 12 bytes x hidden x max_rows of mailboxes.
  int64_t max_rows = 4096;
  bool hops = false;                          // add from rank to rank, as mode batch_invariant does
  absl::Duration timeout = absl::Seconds(2);  // how long a kernel waits for a peer
};

struct AllReduceState;  // all_reduce.cu
struct RankGroup;       // device/rank_signals.cuh

// One rank's end.
class PeerAllReduce {
 public:
  ~PeerAllReduce();
  // The ends of all ranks, by rank. Loads every kernel on every device, so that no launch has to
  // wait for a device that waits for a peer. INVALID_ARGUMENT: an option. RESOURCE_EXHAUSTED: no
  // memory for the mailboxes.
  static absl::StatusOr<std::vector<std::unique_ptr<PeerAllReduce>>> Create(
      const PeerGroup& group, const AllReduceOptions& options);

  // norm.residual += bf16(sum of the ranks' partials + norm.bias); norm.out = RMSNorm(residual) *
  // norm.weight, on every rank. `partial` is this rank's [norm.rows, norm.hidden] fp32, or null if
  // the kernel launched last has pushed it. norm.sum is
  // ignored; bias, weight, eps and, before the call, residual are the same on every rank. On the
  // rank's device, which must be the calling thread's. INVALID_ARGUMENT: another hidden size.
  // INTERNAL: CUDA refused the launch.
  absl::Status Norm(const float* partial, const RmsNormArgs& norm, const Stream& stream);

  // For LinearArgs::push of the linear layer before a Norm of `rows` rows, all ranks alike; valid
  // until the next call. Null: the layer must store its partial.
  const PartialPush* Push(int64_t rows);

  // Ends when all ranks' streams have come here; what they wrote before is then visible to all.
  absl::Status Barrier(const Stream& stream);

  // Ends when, for every peer q, counts[q] has come to `wanted` (modulo 2^32, at most 2^31 - 1
  // ahead), with what q wrote before it. counts: [ranks] in this rank's memory, written by the
  // peers.
  absl::Status Await(const uint32_t* counts, uint32_t wanted, const Stream& stream);

  // Looks, without waiting for the GPU, whether a wait has been given up. DEADLINE_EXCEEDED names
  // the rank that gave up and those it missed. From then on no kernel of the group waits, outputs
  // are NaN, and the group must be made anew.
  absl::Status Check() const;

  size_t bytes() const;  // of the memory that the ranks share, on each

 private:
  PeerAllReduce(std::shared_ptr<AllReduceState> state, int rank);
  RankGroup Group() const;

  std::shared_ptr<AllReduceState> state_;
  int rank_;
  std::unique_ptr<PartialPush> push_;
};

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COLLECTIVE_ALL_REDUCE_H_
