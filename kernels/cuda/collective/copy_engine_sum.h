// The sum over tensor-parallel ranks of a step in two halves, carried by the GPUs' copy engines: it
// takes no multiprocessor from the matrix products that run meanwhile.
//
// A half's rows are dealt out to the ranks in runs. Every rank copies its partial sums of a run
// into the mailbox of the run's owner, which adds them up, takes them into the residual, normalises
// and copies the rows to all. The bits are those of LaunchReduce followed by LaunchRmsNorm. What
// has arrived is counted in the receiver's memory, by a write that follows the copy on its stream;
// the receiver waits in a kernel, PeerAllReduce::Await, bounded as all waits for peers are.
//
// The ranks' threads meet before one of them launches a kernel that waits: nothing waits on a GPU
// for what a peer's thread has yet to issue. For CUDA may hold a thread up until its GPU has come
// to rest (it loads a kernel, or allocates memory), and with it another that copies to that GPU.
//
// INVARIANT: nothing is overwritten before it has been read (CopyEngineSumTest.RepeatsWithDelays).
// A rank sends the partials of a half's next sum after it has received all rows of this one, and
// their owners sent those after they had read its partials. A row's owner sends the next one after
// it has received the next partials of every rank, which each made out of this row.
#ifndef ISOBIT_KERNELS_CUDA_COLLECTIVE_COPY_ENGINE_SUM_H_
#define ISOBIT_KERNELS_CUDA_COLLECTIVE_COPY_ENGINE_SUM_H_

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
#include "kernels/cuda/collective/all_reduce.h"
#include "kernels/cuda/device/launch.h"

namespace isobit::cuda {

struct CopyEngineSumOptions {
  int64_t hidden = 0;    // columns of a row
  int64_t max_rows = 0;  // of a half
  // How long a rank's thread waits for another's.
  absl::Duration timeout = absl::Seconds(30);
};

// One rank's end. Not for capture into a graph. Errors: INVALID_ARGUMENT: rows or columns that the
// object was not made for. INTERNAL: CUDA refused. DEADLINE_EXCEEDED: a peer's thread has not come.
// A peer's GPU that does not come: PeerAllReduce::Check.
class CopyEngineSum final : public OverlappedSum {
 public:
  // Bytes of the memory that the ranks share, on each.
  static size_t SharedBytes(const CopyEngineSumOptions& options, int ranks);

  // `memory`, of SharedBytes, all zero at first, and `meeting`, both the same for all ranks,
  // `waits`, the rank's, and `stream`, where its ops run, outlive the object. On the rank's device,
  // which must be the calling thread's, as in every later call. FAILED_PRECONDITION: the driver is
  // too old.
  static absl::StatusOr<std::unique_ptr<CopyEngineSum>> Create(
      const CopyEngineSumOptions& options, int rank, int ranks, const PeerMemory& memory,
      ThreadBarrier& barrier, PeerAllReduce& waits, const Stream& stream);
  ~CopyEngineSum() override;

  absl::Status Send(int half, const float* partial, int64_t rows) override;
  absl::Status Sum(int half, const RmsNormArgs& norm) override;
  absl::StatusOr<const Bf16*> Receive(int half) override;

 private:
  enum Leg { kPartials, kRows };
  // The present sum of a half.
  struct Half {
    const float* partial = nullptr;
    int64_t rows = 0;
    uint32_t number = 0;  // of sums so far
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
  // In the memory of rank `of`: what has come of a leg, [ranks]; the mailbox for the partials of
  // rank `from`; the half's rows.
  uint32_t* Counts(int of, int half, Leg leg) const;
  float* Mailbox(int of, int half, int from) const;
  Bf16* Rows(int of, int half) const;

  // Has `copy` put a copy to each peer on copies_, behind the ops so far, and then counts.
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
  // One for all copies: side by side they would get into each other's way.
  cudaStream_t copies_ = nullptr;
  cudaEvent_t ready_ = nullptr;  // what the next copies wait for
  Half halves_[2];
  bool met_ = false;  // since the last copies were issued
};

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COLLECTIVE_COPY_ENGINE_SUM_H_
