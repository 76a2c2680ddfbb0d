// The sum over tensor-parallel ranks for a step in two halves (micro-batch overlap), by the GPUs'
// copy engines. It takes no multiprocessor from the matrix products that run at the same time.
//
// The ranks share a half's rows; each owns a contiguous run of them. In the reduce-scatter, every
// rank copies its partial sums of a run into the mailbox of the run's owner. The owner adds them
// up, updates the residual and normalises. In the all-gather, it copies its rows to all ranks. The
// bits are those of Run followed by Run. On the copies' stream, each copy is
// followed by a write that counts it in the receiver's memory. The receiver waits for it in a
// kernel, PeerAllReduce::Await, with the timeout of all waits for peers.
//
// The ranks' threads pass a barrier before one of them launches a waiting kernel, so that no GPU
// waits for work that a peer's thread has not issued yet. Otherwise there can be a deadlock: CUDA
// may block a thread until its GPU is idle (to load a kernel or to allocate memory), and with it
// another thread that copies to that GPU.
//
// INVARIANT: nothing is overwritten before it has been read (CopyEngineSumTest.RepeatsWithDelays).
// Mailboxes: a rank sends the partials of a half's next sum only after it has received all rows of
// this sum, and owners send those rows only after they have read the rank's partials. Rows: an
// owner sends its next rows only after it has received the next partials of every rank, which each
// rank has computed from these rows.
#ifndef ISOBIT_KERNELS_CUDA_SM90_COLLECTIVE_COPY_ENGINE_SUM_H_
#define ISOBIT_KERNELS_CUDA_SM90_COLLECTIVE_COPY_ENGINE_SUM_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/parallel/peer_group.h"
#include "common/parallel/thread_barrier.h"
#include "kernels/all_reduce.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/cuda/sm90/collective/all_reduce.h"
#include "kernels/ops/rms_norm.h"

namespace isobit::cuda {

struct CopyEngineSumOptions {
  int64_t hidden = 0;    // columns of a row
  int64_t max_rows = 0;  // of a half
  // How long a rank's thread waits for the other ranks' threads.
  absl::Duration timeout = absl::Seconds(30);
};

// One rank's end of the sum. It cannot be captured into a graph. Errors: INVALID_ARGUMENT: the
// object was not made for so many rows or columns. INTERNAL: CUDA refused. DEADLINE_EXCEEDED: a
// peer's thread has not come. If a peer's GPU does not come, PeerAllReduce::Check reports it.
class CopyEngineSum final : public OverlappedSum {
 public:
  // The size of the memory that the ranks share, on each rank.
  static size_t SharedBytes(const CopyEngineSumOptions& options, int ranks);

  // All ranks share `memory` (SharedBytes bytes on each, initially all zero) and `barrier`. `waits`
  // is this rank's, and its ops run on `stream`. All four outlive the object. The rank's device
  // must be current on the calling thread, here and in all later calls. FAILED_PRECONDITION: the
  // driver is too old.
  static absl::StatusOr<std::unique_ptr<CopyEngineSum>> Create(
      const CopyEngineSumOptions& options, int rank, int ranks, const PeerMemory& memory,
      ThreadBarrier& barrier, PeerAllReduce& waits, const Stream& stream);
  ~CopyEngineSum() override;

  absl::Status Send(int half, const float* partial, int64_t rows) override;
  absl::Status Sum(int half, const RmsNormArgs& norm) override;
  absl::StatusOr<const Bf16*> Receive(int half) override;

 private:
  enum Leg { kPartials, kRows };  // the phases: reduce-scatter of partials, all-gather of rows
  // The current sum of a half.
  struct Half {
    const float* partial = nullptr;
    int64_t rows = 0;
    uint32_t number = 0;  // the number of sums so far
  };

  CopyEngineSum(const CopyEngineSumOptions& options, int rank, int ranks, const PeerMemory& memory,
                ThreadBarrier& barrier, PeerAllReduce& waits, const Stream& stream)
      : options_(options),
        rank_(rank),
        ranks_(ranks),
        memory_(memory),
        barrier_(barrier),
        waits_(waits),
        stream_(stream) {}

  // The first row that rank q owns of a half's `rows`.
  int64_t FirstRow(int q, int64_t rows) const { return rows * q / ranks_; }
  // In the memory of rank `of`: Counts: the counts of a phase's arrivals, [ranks]; Mailbox: the
  // partials of rank `from`; Rows: the half's rows.
  uint32_t* Counts(int of, int half, Leg leg) const;
  float* Mailbox(int of, int half, int from) const;
  Bf16* Rows(int of, int half) const;

  // Calls `copy` to enqueue a copy to each peer on copies_, after the ops issued so far, and then
  // counts the copies in the peers' memory.
  absl::Status Push(int half, Leg leg, const std::function<cudaError_t(int, cudaStream_t)>& copy);

  // Waits until all ranks have issued their copies so far.
  absl::Status WaitForRanks();

  const CopyEngineSumOptions options_;
  const int rank_;
  const int ranks_;
  const PeerMemory& memory_;
  ThreadBarrier& barrier_;
  PeerAllReduce& waits_;
  const Stream& stream_;
  // One stream for all copies: copies that run at the same time would slow each other down.
  cudaStream_t copies_ = nullptr;
  cudaEvent_t ready_ = nullptr;  // the next copies wait for it
  Half halves_[2];
  bool met_ = false;  // whether the threads have passed the barrier since the last copies
};

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_COLLECTIVE_COPY_ENGINE_SUM_H_
