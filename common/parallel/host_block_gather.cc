// Each rank's gather thread, and the waits for its peers.
#include "common/parallel/host_block_gather.h"

#include <cstring>
#include <new>

#include "common/base/status_macros.h"

namespace isobit {
namespace {

constexpr std::align_val_t kAlignment{256};

}  // namespace

void HostBlockGather::AlignedFree::operator()(std::byte* p) const {
  ::operator delete[](p, kAlignment);
}

HostBlockGather::HostBlockGather(Communicator& comm, size_t block_bytes) : comm_(comm) {
  for (auto& buffer : buffers_) {
    buffer.reset(static_cast<std::byte*>(::operator new[](block_bytes, kAlignment)));
  }
  thread_ = std::thread([this] { Run(); });
}

HostBlockGather::~HostBlockGather() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

absl::Status HostBlockGather::Start(int buffer, const std::byte* shard, size_t bytes) {
  Enqueue({buffer, shard, bytes});
  last_in_[buffer] = num_started_;
  return absl::OkStatus();
}

absl::StatusOr<const std::byte*> HostBlockGather::Use(int buffer) {
  ISOBIT_RETURN_IF_ERROR(WaitFor(last_in_[buffer]));
  return buffers_[buffer].get();
}

// Ops in host memory have ended when their launch returns.
absl::Status HostBlockGather::Release(int /*buffer*/) { return absl::OkStatus(); }

absl::Status HostBlockGather::WaitForArrival() { return WaitFor(num_started_); }

absl::Status HostBlockGather::Finish() {
  Enqueue({-1, nullptr, 0});
  ISOBIT_RETURN_IF_ERROR(WaitFor(num_started_));
  const std::lock_guard lock(mutex_);
  busy_ = std::chrono::duration_cast<std::chrono::microseconds>(worked_);
  worked_ = {};
  return absl::OkStatus();
}

void HostBlockGather::Enqueue(const Job& job) {
  const std::lock_guard lock(mutex_);
  jobs_.push_back(job);
  ++num_started_;
  changed_.notify_all();
}

absl::Status HostBlockGather::WaitFor(uint64_t jobs) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return num_done_ >= jobs || !failure_.ok(); });
  return num_done_ >= jobs ? absl::OkStatus() : failure_;
}

void HostBlockGather::Run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || (!jobs_.empty() && failure_.ok()); });
    if (stopping_) return;
    const Job job = jobs_.front();
    jobs_.pop_front();
    lock.unlock();
    const auto start = std::chrono::steady_clock::now();
    const absl::Status status = Do(job);
    lock.lock();
    worked_ += std::chrono::steady_clock::now() - start;
    if (status.ok()) {
      ++num_done_;
    } else {
      failure_ = status;
    }
    changed_.notify_all();
  }
}

absl::Status HostBlockGather::Do(const Job& job) {
  if (job.buffer < 0) return comm_.Barrier();
  ISOBIT_ASSIGN_OR_RETURN(const absl::Span<const void* const> sent,
                          comm_.Gather(job.shard, job.bytes));
  std::byte* next = buffers_[job.buffer].get();
  for (const void* shard : sent) {
    std::memcpy(next, shard, job.bytes);
    next += job.bytes;
  }
  return absl::OkStatus();
}

}  // namespace isobit
