// Steps that wait in a queue. See deferred_executor.h.
#include "tests/rollout/engine/deferred_executor.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "common/base/status_macros.h"
#include "gtest/gtest.h"
#include "tests/support/forwarding_rank.h"

namespace isobit {
namespace {

constexpr int32_t kNoToken = -1;

// A copy of a launched step.
struct Snapshot {
  Snapshot(const ModelStep& step, int32_t page_size)
      : ids(step.batch.ids), feeds(step.feeds), logit_rows(step.logit_rows) {
    for (const SequenceRows& rows : step.batch.sequences) {
      const int64_t tokens = rows.first_position + rows.num_rows;
      sequences.emplace_back(
          rows.first_row, rows.num_rows, rows.first_position,
          std::vector<int32_t>(rows.pages, rows.pages + (tokens + page_size - 1) / page_size));
    }
    for (const LogProbRequest& request : step.requests) {
      const RowSampling& s = request.sampling;
      parameters.emplace_back(s.temperature, s.top_p, s.min_p, s.repetition_penalty,
                              s.presence_penalty, s.frequency_penalty);
      places.emplace_back(s.top_k, s.seed, s.sample, s.position, request.top_logprobs,
                          request.target);
      banned.emplace_back(s.banned.begin(), s.banned.end());
      for (const TokenCount& c : s.counts) counts.emplace_back(c.id, c.in_output, c.in_prompt);
      for (const TokenBias& b : s.biases) biases.emplace_back(b.id, b.bias);
    }
  }
  bool operator==(const Snapshot&) const = default;

  std::vector<int32_t> ids, feeds;
  std::vector<int64_t> logit_rows;
  std::vector<std::tuple<int64_t, int64_t, int64_t, std::vector<int32_t>>> sequences;
  std::vector<std::tuple<float, float, float, float, float, float>> parameters;
  std::vector<std::tuple<int32_t, uint64_t, uint32_t, uint32_t, int32_t, int32_t>> places;
  std::vector<std::vector<int32_t>> banned;
  std::vector<std::tuple<int32_t, uint32_t, bool>> counts;
  std::vector<std::pair<int32_t, float>> biases;
};

class DeferredExecutor final : public testing_support::ForwardingRank {
 public:
  DeferredExecutor(std::unique_ptr<RankExecutor> rank, const RankOptions& options)
      : ForwardingRank(std::move(rank)), comm_(options.comm), page_size_(options.page_size) {}

  int depth() const override { return 2; }

  absl::Status Launch(const ModelStep& step) override {
    if (launched_.size() == 2) return absl::FailedPreconditionError("a third step in flight");
    launched_.push_back({&step, Snapshot(step, page_size_)});
    return absl::OkStatus();
  }

  absl::Status Collect(ModelStep& step) override {
    if (launched_.empty() || launched_.front().first != &step) {
      return absl::FailedPreconditionError("a step collected out of turn");
    }
    EXPECT_TRUE(launched_.front().second == Snapshot(step, page_size_));
    launched_.pop_front();
    ModelStep own = step;
    for (size_t i = 0; i < step.feeds.size(); ++i) {
      if (step.feeds[i] < 0) continue;
      const SequenceRows& rows = step.batch.sequences[i];
      own.batch.ids[static_cast<size_t>(rows.first_row)] =
          last_tokens_.at(static_cast<size_t>(step.feeds[i]));
    }
    // Also clears results of an earlier step: rows that another rank draws must look untouched.
    LogProbResult untouched;
    untouched.token.id = kNoToken;
    own.results.assign(step.results.size(), untouched);
    ISOBIT_RETURN_IF_ERROR(ForwardingRank::Launch(own));
    ISOBIT_RETURN_IF_ERROR(ForwardingRank::Collect(own));
    for (size_t i = 0; i < own.results.size(); ++i) {
      const LogProbResult& result = own.results[i];
      if (result.token.id != kNoToken || !result.finite) step.results[i] = result;
    }
    if (comm_.rank() == 0) step.times = own.times;
    return ShareTokens(own);
  }

  absl::Status Serve(const PreparedBlocks& prepared) override {
    if (!launched_.empty()) return absl::FailedPreconditionError("Serve with a step in flight");
    return ForwardingRank::Serve(prepared);
  }

 private:
  // last_tokens_ = the tokens that all ranks have drawn; 0 where the logits were not finite.
  absl::Status ShareTokens(const ModelStep& own) {
    own_tokens_.clear();
    for (const LogProbResult& result : own.results) {
      own_tokens_.push_back(result.finite ? result.token.id : kNoToken);
    }
    ISOBIT_ASSIGN_OR_RETURN(const absl::Span<const void* const> sent,
                            comm_.Gather(own_tokens_.data(), own_tokens_.size() * sizeof(int32_t)));
    last_tokens_.assign(own_tokens_.size(), 0);
    for (const void* tokens : sent) {
      for (size_t i = 0; i < last_tokens_.size(); ++i) {
        last_tokens_[i] = std::max(last_tokens_[i], static_cast<const int32_t*>(tokens)[i]);
      }
    }
    return comm_.Barrier();  // own_tokens_ may change
  }

  Communicator& comm_;
  const int32_t page_size_;
  std::deque<std::pair<const ModelStep*, Snapshot>> launched_;
  std::vector<int32_t> own_tokens_, last_tokens_;  // of the step collected last
};

}  // namespace

MakeRank MakeDeferredRank(MakeRank make_rank) {
  return [make_rank = std::move(make_rank)](
             const RankOptions& options) -> absl::StatusOr<std::unique_ptr<RankExecutor>> {
    ISOBIT_ASSIGN_OR_RETURN(std::unique_ptr<RankExecutor> rank, make_rank(options));
    return std::make_unique<DeferredExecutor>(std::move(rank), options);
  };
}

}  // namespace isobit
