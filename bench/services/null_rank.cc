// A rank whose steps end at times of a queue, and draw always the same token.
#include "bench/services/null_rank.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <thread>

namespace isobit::bench {
namespace {

using Clock = std::chrono::steady_clock;

class NullRank final : public RankExecutor {
 public:
  NullRank(const RankOptions& options, std::chrono::microseconds step_time,
           std::atomic<uint64_t>& num_rows)
      : rank_(static_cast<size_t>(options.comm.rank())),
        size_(static_cast<size_t>(options.comm.size())),
        step_time_(step_time),
        num_rows_(num_rows) {}

  std::string backend() const override { return "null"; }
  int depth() const override { return 2; }

  absl::StatusOr<CacheSize> CacheThatFits(const CacheSize& most) const override {
    return CacheSize{.num_pages = 1 << 21, .page_size = most.page_size};
  }
  absl::Status AllocateKvCache(const CacheSize& /*size*/) override { return absl::OkStatus(); }

  absl::Status Launch(const ModelStep& /*step*/) override {
    const Clock::time_point start = Clock::now();
    ends_.push_back((ends_.empty() ? start : std::max(start, ends_.back())) + step_time_);
    return absl::OkStatus();
  }

  absl::Status Collect(ModelStep& step) override {
    if (step_time_.count() > 0) std::this_thread::sleep_until(ends_.front());
    ends_.pop_front();
    if (rank_ == 0) num_rows_ += step.results.size();
    for (size_t i = rank_; i < step.results.size(); i += size_) {
      step.results[i].token = {.id = 7, .logprob = -1.0f};
    }
    return absl::OkStatus();
  }

  RankMemory memory() const override { return {}; }
  bool has_variant() const override { return false; }
  ProbedRank* probed() override { return nullptr; }
  ResidentWeights* weights() override { return nullptr; }
  KvCache* kv_cache() override { return nullptr; }
  absl::Status Serve(const PreparedBlocks& /*prepared*/) override { return absl::OkStatus(); }

 private:
  const size_t rank_;
  const size_t size_;
  const std::chrono::microseconds step_time_;
  std::atomic<uint64_t>& num_rows_;
  std::deque<Clock::time_point> ends_;  // of the steps in flight
};

}  // namespace

MakeRank MakeNullRank(std::chrono::microseconds step_time, std::atomic<uint64_t>& num_rows) {
  return [step_time,
          &num_rows](const RankOptions& options) -> absl::StatusOr<std::unique_ptr<RankExecutor>> {
    return std::make_unique<NullRank>(options, step_time, num_rows);
  };
}

}  // namespace isobit::bench
