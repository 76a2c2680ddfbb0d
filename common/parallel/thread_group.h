// A communicator group whose ranks are threads of one process: they read each other's buffers in
// place.
#ifndef ISOBIT_COMMON_PARALLEL_THREAD_GROUP_H_
#define ISOBIT_COMMON_PARALLEL_THREAD_GROUP_H_

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "common/parallel/communicator.h"

namespace isobit {

class ThreadGroup {
 public:
  explicit ThreadGroup(int size);
  ~ThreadGroup();
  ThreadGroup(const ThreadGroup&) = delete;
  ThreadGroup& operator=(const ThreadGroup&) = delete;

  // Owned by the group.
  Communicator& rank(int rank);
  void Abort(const absl::Status& reason);

 private:
  class Rank;

  // Publishes this rank's pointer and waits until all ranks have.
  absl::Status Exchange(int rank, const void* send);

  std::mutex mutex_;
  std::condition_variable changed_;
  absl::Status failure_;
  int arrived_ = 0;
  uint64_t round_ = 0;
  // Two sets of pointers, used in turn: a rank may enter the next round while a slower one still
  // reads the current one.
  std::vector<const void*> sent_[2];
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_PARALLEL_THREAD_GROUP_H_
