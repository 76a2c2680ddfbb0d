// What a rank on a GPU draws in a step: the logprobs of its requests' rows, and the ids with which
// the next step begins. Not here: the forward pass (cuda_executor.h), and how ranks read each
// other's buffers (rank_exchange.h).
#ifndef ISOBIT_KERNELS_RUNTIME_STEP_DRAWS_H_
#define ISOBIT_KERNELS_RUNTIME_STEP_DRAWS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/rank_count.h"
#include "kernels/blocks/rank_shape.h"
#include "kernels/cuda/common/rows/step_kernels.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/sm90/log_probs/transfer.h"
#include "kernels/ops/log_probs.h"
#include "kernels/runtime/rank_exchange.h"
#include "kernels/runtime/rank_executor.h"

namespace isobit {

// The sizes of what ranks exchange in order to draw. They are equal for all ranks.
struct DrawShape {
  int num_ranks = 1;
  int64_t vocab = 0;
  int64_t max_sequences = 0;  // requests of a step
  // Rank r has the logits of columns [first_column[r], first_column[r + 1]).
  std::array<int64_t, kMaxRanks + 1> first_column{};

  static absl::StatusOr<DrawShape> Of(const RankOptions& options);
  int64_t columns(int rank) const {
    return first_column[static_cast<size_t>(rank) + 1] - first_column[static_cast<size_t>(rank)];
  }
  // Of the rank with the most. NCCL gathers that many from every rank.
  int64_t most_columns() const;
  // The sizes of a rank's buffers in bytes.
  ExchangeBytes exchange_bytes() const;
};

// One rank's draws, for as many steps in flight as `depth` says. Used on the rank's thread.
class StepDraws {
 public:
  // `device` and `exchange` outlive the object. RESOURCE_EXHAUSTED: there is no memory.
  static absl::StatusOr<std::unique_ptr<StepDraws>> Create(const DrawShape& shape, int rank,
                                                           int depth, CudaDevice& device,
                                                           RankExchange& exchange);

  // Where the forward pass writes this rank's columns of the logits: [requests, columns] fp32.
  float* logits() const;
  // What the last launched step draws, on the GPU: [requests] int32.
  const int32_t* ids() const { return reinterpret_cast<const int32_t*>(ids_.get()); }

  // Enqueues the draws of a step, whose logits are there, on the rank's stream. Each row is
  // reported by one rank.
  absl::Status Launch(const std::vector<LogProbRequest>& requests);

  // Sets the results of the rows that this rank reports, for the oldest launched step that is not
  // collected. The stream must have completed that step's draws.
  void Collect(ModelStep& step);

  size_t bytes() const;  // on the GPU, apart from what device and exchange count

 private:
  // What a launched step keeps until it is collected.
  struct Slot {
    cuda::LogProbTransfer log_probs;
    LogProbsArgs args;  // the step's rows from first_row on, whose logits this rank has
    size_t first_row = 0;
    size_t own_begin = 0;  // the first of them that this rank reports
    size_t own_end = 0;
  };

  StepDraws(const DrawShape& shape, int rank, int depth, CudaDevice& device, RankExchange& exchange)
      : shape_(shape),
        rank_(rank),
        slots_(static_cast<size_t>(depth)),
        device_(device),
        exchange_(exchange) {}
  absl::Status Allocate();

  size_t num_ranks() const { return static_cast<size_t>(shape_.num_ranks); }
  // Rows are distributed over the ranks in contiguous runs: [begin, end) to this rank.
  std::pair<size_t, size_t> RowsOf(size_t num_rows, int rank) const;
  LogProbsArgs Args(const std::vector<LogProbRequest>& requests, size_t begin, size_t end,
                    const float* logits, int64_t columns) const;
  // Every rank sums and draws in its ranges of the vocabulary, then combines the results of all
  // ranks, so that only a few numbers per row cross the links.
  absl::Status DrawByRanges(const std::vector<LogProbRequest>& requests, Slot& slot);
  // Every rank gathers its share of the rows as whole rows, draws, and gathers all ranks' draws.
  absl::Status DrawByRows(const std::vector<LogProbRequest>& requests, Slot& slot);

  const DrawShape shape_;
  const int rank_;
  std::vector<Slot> slots_;
  CudaDevice& device_;
  RankExchange& exchange_;
  Memory whole_rows_;  // [this rank's rows, vocab] fp32, with several ranks
  Memory ids_;         // [max_sequences] int32
  int64_t num_launched_ = 0;
  int64_t num_collected_ = 0;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_STEP_DRAWS_H_
