// A rank to which something happens in a chosen step, such as the failure of its GPU.
#ifndef ISOBIT_TESTS_SUPPORT_FAULTY_RANK_H_
#define ISOBIT_TESTS_SUPPORT_FAULTY_RANK_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "common/base/status_macros.h"
#include "tests/support/forwarding_rank.h"

namespace isobit::testing_support {

struct Fault {
  int rank = 0;
  int64_t step = 0;  // counted from 0 at the rank's start
  // Called before the step is launched; an error is the launch's.
  std::function<absl::Status()> happen;
};

class FaultyRank final : public ForwardingRank {
 public:
  FaultyRank(std::unique_ptr<RankExecutor> rank, Fault fault)
      : ForwardingRank(std::move(rank)), fault_(std::move(fault)) {}

  absl::Status Launch(const ModelStep& step) override {
    if (num_launched_++ == fault_.step) ISOBIT_RETURN_IF_ERROR(fault_.happen());
    return ForwardingRank::Launch(step);
  }

 private:
  const Fault fault_;
  int64_t num_launched_ = 0;
};

// Makes ranks by `make_rank`, of which one is faulty.
inline MakeRank WithFault(MakeRank make_rank, Fault fault) {
  return [make_rank = std::move(make_rank), fault = std::move(fault)](
             const RankOptions& options) -> absl::StatusOr<std::unique_ptr<RankExecutor>> {
    ISOBIT_ASSIGN_OR_RETURN(std::unique_ptr<RankExecutor> rank, make_rank(options));
    if (options.shape.rank != fault.rank) return rank;
    return std::make_unique<FaultyRank>(std::move(rank), fault);
  };
}

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_SUPPORT_FAULTY_RANK_H_
