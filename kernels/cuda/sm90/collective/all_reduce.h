// The sum over tensor-parallel ranks at the end of a row-parallel layer, through memory that the
// ranks' GPUs map. One kernel computes it, updates the residual stream and computes RMSNorm.
//
// The bits are those of Run followed by Run (C4, C5), for every schedule
// (all_reduce_schedule.h). There is no host synchronisation and no NVLink multicast. A rank
// launches on one stream, or on several that events put in order. All ranks launch the same
// operations of the same shapes in the same order, from any threads; replaying CUDA graphs counts,
// too. The kernels keep their state in GPU memory.
//
// INVARIANT: a word of a mailbox is either empty or data of this operation
// (AllReduceTest.ReplaysWithDelays). Every word is its own flag: empty is a NaN that no rank sends.
// The reader empties what it has read. Operations alternate between two mailboxes, and no rank ends
// operation k before all ranks have begun it. So when the kernels of operation k+2 write, including
// the linear layer before it (Push), the readers have emptied in operation k everything that they
// overwrite.
//
// If a peer does not come within `timeout`, all ranks stop waiting: see Check. Ranks may share a
// GPU (to test more ranks than there are GPUs). Then, between its operations, a rank must do
// nothing that waits for the GPU to become idle, because another rank's kernel waits there for this
// rank. Such are: loading a kernel at its first launch (CUDA_MODULE_LOADING=EAGER loads all at
// start), cudaFree, and streams with a common hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=32).
#ifndef ISOBIT_KERNELS_CUDA_SM90_COLLECTIVE_ALL_REDUCE_H_
#define ISOBIT_KERNELS_CUDA_SM90_COLLECTIVE_ALL_REDUCE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/parallel/peer_group.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/ops/linear.h"
#include "kernels/ops/rms_norm.h"

namespace isobit::cuda {

struct AllReduceJob;       // all_reduce.cuh
struct AllReduceSchedule;  // all_reduce_schedule.h
using AllReduceKernel = void (*)(AllReduceJob);
// The kernel of a schedule, for some order of addition. aligned: rows begin at multiples of 16
// bytes and consist of whole groups of four columns.
using AllReduceKernels = AllReduceKernel (*)(const AllReduceSchedule& schedule, int ranks,
                                             bool aligned);
// In the contract's order.
AllReduceKernel TreeAllReduceKernel(const AllReduceSchedule& schedule, int ranks, bool aligned);

// When linear layers push their partials. Changes speed, never a bit. -1: as PushTableOf says.
struct PushOptions {
  int64_t rows = -1;         // in steps of at most so many rows
  double bytes_per_us = -1;  // sent by a rank; for choosing tiles; 0: not used for that
};

struct AllReduceOptions {
  int64_t hidden = 0;  // columns of a row, 1 .. kMaxAllReduceHidden
  // Rows of one kernel, at most 32768. More rows take several kernels; for twice as many rows this
  // costs 6 % of the time. A rank's GPU holds 12 bytes x hidden x max_rows of mailboxes.
  int64_t max_rows = 4096;
  AllReduceKernels kernels = TreeAllReduceKernel;
  PushOptions push = {};
  absl::Duration timeout = absl::Seconds(2);  // how long a kernel waits for a peer
};

struct AllReduceState;  // all_reduce.cu
struct RankGroup;       // rank_signals.cuh

// One rank's end of the all-reduce.
class PeerAllReduce {
 public:
  ~PeerAllReduce();
  // Makes the ends of all ranks, by rank. Loads every kernel on every device, so that no launch
  // waits for a device that waits for a peer. INVALID_ARGUMENT: an option is out of range.
  // RESOURCE_EXHAUSTED: there is no memory for the mailboxes.
  static absl::StatusOr<std::vector<std::unique_ptr<PeerAllReduce>>> Create(
      const PeerGroup& group, const AllReduceOptions& options);

  // norm.residual += bf16(sum of the ranks' partials + norm.bias); norm.out = RMSNorm(residual) *
  // norm.weight, on every rank. `partial` is this rank's [norm.rows, norm.hidden] fp32, or null if
  // the last launched kernel has pushed it. norm.sum is ignored. bias, weight, eps and, before the
  // call, residual are the same on every rank. The rank's device must be current on the calling
  // thread. INVALID_ARGUMENT: the hidden size is another one. INTERNAL: CUDA refused the launch.
  absl::Status Norm(const float* partial, const RmsNormArgs& norm, const Stream& stream);

  // LinearArgs::push for the linear layer before a Norm of `rows` rows. All ranks get the same
  // decision; valid until the next call. Null: the layer must store its partial.
  const PartialPush* Push(int64_t rows);

  // A barrier on the stream: it ends when the streams of all ranks have reached it. What they wrote
  // before is then visible to all ranks.
  absl::Status Barrier(const Stream& stream);

  // A wait on the stream: it ends when counts[q] has reached `wanted` for every peer q (modulo
  // 2^32, at most 2^31 - 1 ahead). What q wrote before its count is then visible. counts: [ranks]
  // in this rank's memory, written by the peers.
  absl::Status Await(const uint32_t* counts, uint32_t wanted, const Stream& stream);

  // Checks, without waiting for the GPU, whether a rank has given up a wait. DEADLINE_EXCEEDED
  // names that rank and the ranks that had not come. From then on no kernel of the group waits,
  // outputs are NaN, and the group must be created again.
  absl::Status Check() const;

  size_t bytes() const;  // of the memory that ranks share, on each rank

 private:
  PeerAllReduce(std::shared_ptr<AllReduceState> state, int rank);
  RankGroup Group() const;

  std::shared_ptr<AllReduceState> state_;
  int rank_;
  std::unique_ptr<PartialPush> push_;
};

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_COLLECTIVE_ALL_REDUCE_H_
