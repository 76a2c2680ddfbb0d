// Rank signals: words in each other's memory in which the kernels of a group's ranks count the
// operations that they have begun, and waits for these words, with a timeout.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_DEVICE_RANK_SIGNALS_CUH_
#define ISOBIT_KERNELS_CUDA_COMMON_DEVICE_RANK_SIGNALS_CUH_

#include <cstddef>
#include <cstdint>

#include "common/base/rank_count.h"
#include "kernels/cuda/common/device/system_memory.cuh"

namespace isobit::cuda {

// At the start of each rank's shared memory; initially all zero. Counts are modulo 2^32.
struct alignas(256) RankSignals {
  uint32_t ended;             // operations that this rank has ended; only this rank writes it
  uint32_t failed;            // a failure word, or 0; any rank writes it
  uint32_t tickets;           // blocks that have begun the current operation
  uint32_t begun[kMaxRanks];  // [q]: operations that rank q has begun; q adds to it
};

// A failure word: this bit, the number of the rank that gave up, and one bit for each rank that had
// not begun the operation until then.
inline constexpr uint32_t kFailed = 0x80000000u;
inline constexpr int kReporterShift = 8;

inline constexpr int64_t kTick = 1024;  // nanoseconds

// The group as seen by the kernels of one rank.
struct RankGroup {
  std::byte* memory[kMaxRanks];  // of each rank; begins with the RankSignals
  uint32_t* reports;             // a failure word for each rank, in host memory
  uint32_t timeout;              // in ticks
  int rank;
  int size;

  __device__ RankSignals* signals(int r) const { return reinterpret_cast<RankSignals*>(memory[r]); }
};

// One operation of a rank, as seen by one block. Every thread constructs it at the block's start,
// after WaitForPredecessor.
class Operation {
 public:
  __device__ explicit Operation(const RankGroup& group) : group_(group) {
    const uint2 state = LoadRelaxed(reinterpret_cast<const uint2*>(group.signals(group.rank)));
    number_ = state.x;
    failed_ = state.y != 0;
  }

  __device__ uint32_t number() const { return number_; }

  // Every thread of the block calls it once, at any point. Its barrier depends on what each thread
  // has loaded, so every thread has already read the words that the last block's End overwrites.
  __device__ void TakeTicket() {
    failed_ = __syncthreads_or(failed_) != 0;
    if (threadIdx.x == 0) {
      ticket_ = atomicInc(&group_.signals(group_.rank)->tickets, gridDim.x - 1);
    }
  }

  // Called at the block's end, when the ticket arrived long ago and no thread waits for it.
  __device__ void End() const {
    if (threadIdx.x == 0 && ticket_ == gridDim.x - 1) {
      group_.signals(group_.rank)->ended = number_ + 1;
    }
  }

  // Returns when every peer has announced this operation. The block's first threads call it.
  __device__ void AwaitPeers() const;

  // What Wait needs.
  __device__ const RankGroup& group() const { return group_; }
  __device__ bool failed() const { return failed_; }
  __device__ bool Begun(int q) const {
    const uint32_t begun = LoadAcquire(&group_.signals(group_.rank)->begun[q]);
    return static_cast<int32_t>(begun - number_) > 0;
  }

 private:
  const RankGroup& group_;
  uint32_t number_;
  bool failed_;
  uint32_t ticket_ = 0;
};

// The counts of arrivals from each rank, in this rank's memory, and the count to wait for.
class Arrivals {
 public:
  __device__ Arrivals(const RankGroup& group, const uint32_t* counts, uint32_t wanted)
      : group_(group),
        counts_(counts),
        wanted_(wanted),
        failed_(LoadRelaxed(&group.signals(group.rank)->failed) != 0) {}

  // Returns when every peer's count has reached `wanted`. The block's first threads call it.
  __device__ void Await() const;

  __device__ const RankGroup& group() const { return group_; }
  __device__ bool failed() const { return failed_; }
  __device__ bool Begun(int q) const {
    return static_cast<int32_t>(LoadAcquire(counts_ + q) - wanted_) >= 0;
  }

 private:
  const RankGroup& group_;
  const uint32_t* counts_;  // [group.size]; this rank's own count is not read
  uint32_t wanted_;
  bool failed_;
};

// A thread's wait with a timeout: while (!there) if (!wait.Again()) break; Signals: Operation or
// Arrivals.
template <class Signals>
class Wait {
 public:
  __device__ explicit Wait(const Signals& signals) : signals_(signals) {}

  // Call it when what the thread waits for is not there yet. Returns whether to check again. After
  // the timeout it gives up for the whole group.
  __device__ bool Again() {
    if (signals_.failed()) return false;
    if (++looks_ % kLooks != 0) return true;
    const RankGroup& group = signals_.group();
    if (LoadRelaxed(&group.signals(group.rank)->failed) != 0) return false;
    const auto now = static_cast<uint32_t>(GlobalTimer() / kTick);
    if (looks_ == kLooks) began_ = now;
    if (now - began_ < group.timeout) return true;
    Fail();
    return false;
  }

 private:
  static constexpr uint32_t kLooks = 64;

  __device__ void Fail() const {
    const RankGroup& group = signals_.group();
    uint32_t word = kFailed | static_cast<uint32_t>(group.rank) << kReporterShift;
    for (int q = 0; q < group.size; ++q) {
      if (q != group.rank && !signals_.Begun(q)) word |= 1u << q;
    }
    if (atomicCAS_system(&group.signals(group.rank)->failed, 0u, word) != 0) return;
    for (int q = 0; q < group.size; ++q) {
      if (q != group.rank) StoreRelaxed(&group.signals(q)->failed, word);
      StoreRelaxed(&group.reports[q], word);
    }
  }

  const Signals& signals_;
  uint32_t looks_ = 0;
  uint32_t began_ = 0;  // in ticks
};

// Each of a block's first threads waits for a peer.
template <class Signals>
__device__ __forceinline__ void AwaitEachPeer(const Signals& signals) {
  const int q = static_cast<int>(threadIdx.x);
  if (q >= signals.group().size || q == signals.group().rank) return;
  Wait wait(signals);
  while (!signals.Begun(q) && wait.Again()) {
  }
}

__device__ inline void Operation::AwaitPeers() const { AwaitEachPeer(*this); }
__device__ inline void Arrivals::Await() const { AwaitEachPeer(*this); }

// Tells every peer that this rank has begun its next operation, and releases everything that it
// wrote before. The first threads of one block call it once. In the memory model, this call and
// AwaitPeers order the operations of different ranks.
__device__ __forceinline__ void AnnounceOperation(const RankGroup& group) {
  const int q = static_cast<int>(threadIdx.x);
  if (q >= group.size || q == group.rank) return;
  AddRelease(&group.signals(q)->begun[group.rank], 1);
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_DEVICE_RANK_SIGNALS_CUH_
