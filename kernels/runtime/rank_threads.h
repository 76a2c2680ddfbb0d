// The threads of a group of ranks: one permanent thread per rank, and jobs that all ranks do at the
// same time. Rollout and scorer run their ranks on it. Not here: how ranks exchange data.
#ifndef ISOBIT_KERNELS_RUNTIME_RANK_THREADS_H_
#define ISOBIT_KERNELS_RUNTIME_RANK_THREADS_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace isobit {

class RankThreads {
 public:
  // Starts num_ranks threads; num_ranks is at least 1. on_failure: called at most once, with the
  // first error of a job, on the thread of the rank that failed. It must make the other ranks stop
  // waiting for that rank.
  RankThreads(size_t num_ranks, std::function<void(const absl::Status&)> on_failure);
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  // Runs job(rank) for every rank in [0, num_ranks), each on its
  // rank's thread, and waits for all of them. One call at a time, from
  // any thread but the ranks' own. Returns the error of the rank that
  // failed first. It is final: later calls return it and run nothing.
  absl::Status Run(absl::FunctionRef<absl::Status(size_t rank)> job) { return Run(job, awake_); }
  // The same, but the caller spins for the time `awake` before it sleeps.
  absl::Status Run(absl::FunctionRef<absl::Status(size_t rank)> job,
                   std::chrono::microseconds awake);

  // Whether there are enough cores for ranks and their caller to spin for long.
  bool has_spare_cores() const {
    return std::thread::hardware_concurrency() >= 2 * (threads_.size() + 1);
  }

 private:
  using Job = absl::FunctionRef<absl::Status(size_t rank)>;

  // Gives `job` to all threads; null ends them.
  void Publish(const Job* job);
  void Serve(size_t rank);
  void Fail(const absl::Status& status);

  const std::function<void(const absl::Status&)> on_failure_;
  // How long a thread spins for a job, or for the end of one, before it sleeps: a step of the
  // rollout has two jobs, and the second follows at once. 0 if there are too few cores.
  const std::chrono::microseconds awake_;
  // What the caller writes and what the ranks write are on separate cache lines: ranks that wait
  // for the next job do not slow down those that end this one.
  alignas(64) std::atomic<uint32_t> num_jobs_{0};  // published
  const Job* job_ = nullptr;                       // the last one published
  alignas(64) std::atomic<uint32_t> num_busy_{0};  // ranks that have not yet ended job_
  std::mutex failure_mutex_;                       // for ranks that fail at the same time
  absl::Status failure_;
  std::vector<std::thread> threads_;  // by rank
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_RANK_THREADS_H_
