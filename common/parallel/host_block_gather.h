// Gathers in host memory, between ranks that are threads of one process. Each rank's gathers run on
// a thread of their own.
#ifndef ISOBIT_COMMON_PARALLEL_HOST_BLOCK_GATHER_H_
#define ISOBIT_COMMON_PARALLEL_HOST_BLOCK_GATHER_H_

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "common/parallel/block_gather.h"
#include "common/parallel/communicator.h"

namespace isobit {

class HostBlockGather final : public BlockGather {
 public:
  // `comm` outlives the object and is used by nothing else. block_bytes: the size of the largest
  // gathered block.
  HostBlockGather(Communicator& comm, size_t block_bytes);
  ~HostBlockGather() override;

  absl::Status Start(int buffer, const std::byte* shard, size_t bytes) override;
  absl::StatusOr<const std::byte*> Use(int buffer) override;
  absl::Status Release(int buffer) override;
  absl::Status WaitForArrival() override;
  absl::Status Finish() override;
  std::chrono::microseconds busy() const override { return busy_; }
  void Abort(const absl::Status& reason) override { comm_.Abort(reason); }

 private:
  struct Job {
    int buffer;  // or -1: a barrier
    const std::byte* shard;
    size_t bytes;
  };
  struct AlignedFree {
    void operator()(std::byte* p) const;
  };

  void Run();
  absl::Status Do(const Job& job);
  void Enqueue(const Job& job);
  absl::Status WaitFor(uint64_t jobs);

  Communicator& comm_;
  std::unique_ptr<std::byte[], AlignedFree> buffers_[kBuffers];
  uint64_t last_in_[kBuffers] = {};  // the job that filled it; jobs are numbered from 1
  uint64_t num_started_ = 0;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  uint64_t num_done_ = 0;
  absl::Status failure_;
  bool stopping_ = false;
  std::chrono::steady_clock::duration worked_{0};  // since the last Finish

  std::chrono::microseconds busy_{0};
  std::thread thread_;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_PARALLEL_HOST_BLOCK_GATHER_H_
