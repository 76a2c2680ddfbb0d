// A barrier that carries one pointer a rank, on a mutex and a condition variable: ranks may
// outnumber the cores.
#include "common/parallel/thread_group.h"

#include "common/base/check.h"
#include "common/base/status_macros.h"

namespace isobit {

class ThreadGroup::Rank final : public Communicator {
 public:
  Rank(ThreadGroup& group, int rank) : group_(group), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(group_.ranks_.size()); }

  absl::StatusOr<absl::Span<const void* const>> Gather(const void* send,
                                                       size_t /*bytes*/) override {
    const size_t round = rounds_++;
    ISOBIT_RETURN_IF_ERROR(group_.Exchange(rank_, send));
    return absl::MakeConstSpan(group_.sent_[round % 2]);
  }

  absl::Status Barrier() override {
    ++rounds_;
    return group_.Exchange(rank_, nullptr);
  }

  void Abort(const absl::Status& reason) override { group_.Abort(reason); }

 private:
  ThreadGroup& group_;
  const int rank_;
  size_t rounds_ = 0;
};

ThreadGroup::ThreadGroup(int size) {
  ISOBIT_CHECK(size > 0) << "size " << size;
  for (auto& sent : sent_) sent.resize(static_cast<size_t>(size));
  for (int r = 0; r < size; ++r) ranks_.push_back(std::make_unique<Rank>(*this, r));
}

ThreadGroup::~ThreadGroup() = default;

Communicator& ThreadGroup::rank(int rank) { return *ranks_[static_cast<size_t>(rank)]; }

void ThreadGroup::Abort(const absl::Status& reason) {
  ISOBIT_CHECK(!reason.ok());
  const std::lock_guard lock(mutex_);
  if (failure_.ok()) failure_ = reason;
  changed_.notify_all();
}

absl::Status ThreadGroup::Exchange(int rank, const void* send) {
  std::unique_lock lock(mutex_);
  const uint64_t round = round_;
  sent_[round % 2][static_cast<size_t>(rank)] = send;
  if (failure_.ok() && ++arrived_ == static_cast<int>(ranks_.size())) {
    arrived_ = 0;
    ++round_;
    changed_.notify_all();
  } else {
    changed_.wait(lock, [&] { return round_ != round || !failure_.ok(); });
  }
  // A round that completed stays complete: the failure shows at the next call.
  return round_ != round ? absl::OkStatus() : failure_;
}

}  // namespace isobit
