// See step_draws.h. Both ways give the same bits: a range's sums are integers, and ranges join in
// one fixed tree (docs/NUMERICS.md, C7).
#include "kernels/runtime/step_draws.h"

#include <algorithm>
#include <tuple>

#include "common/base/round_up.h"
#include "common/base/status_macros.h"
#include "kernels/contract/log_prob.h"
#include "kernels/cuda/sm90/log_probs/log_probs.h"
#include "kernels/ops/log_probs.h"

namespace isobit {

absl::StatusOr<DrawShape> DrawShape::Of(const RankOptions& options) {
  DrawShape shape = {.num_ranks = options.shape.size,
                     .vocab = options.plan.config.vocab_size,
                     .max_sequences = options.max_sequences};
  for (int r = 0; r < shape.num_ranks; ++r) {
    ISOBIT_ASSIGN_OR_RETURN(const RankShape rank,
                            ShapeOfRank(options.plan.config, r, shape.num_ranks));
    shape.first_column[static_cast<size_t>(r) + 1] = rank.vocab.end;
  }
  return shape;
}

int64_t DrawShape::most_columns() const {
  int64_t most = 0;
  for (int r = 0; r < num_ranks; ++r) most = std::max(most, columns(r));
  return most;
}

ExchangeBytes DrawShape::exchange_bytes() const {
  const auto rows = static_cast<size_t>(max_sequences);
  ExchangeBytes bytes{};
  bytes[static_cast<size_t>(ExchangeBuffer::kLogits)] =
      rows * static_cast<size_t>(most_columns()) * sizeof(float);
  bytes[static_cast<size_t>(ExchangeBuffer::kRangeResults)] =
      cuda::RangeResultBytes(max_sequences, contract::kLeaves / num_ranks);
  bytes[static_cast<size_t>(ExchangeBuffer::kDraws)] = rows * sizeof(int32_t);
  return bytes;
}

absl::StatusOr<std::unique_ptr<StepDraws>> StepDraws::Create(const DrawShape& shape, int rank,
                                                             int depth, CudaDevice& device,
                                                             RankExchange& exchange) {
  std::unique_ptr<StepDraws> draws(new StepDraws(shape, rank, depth, device, exchange));
  ISOBIT_RETURN_IF_ERROR(draws->Allocate());
  return draws;
}

absl::Status StepDraws::Allocate() {
  const auto rows = static_cast<size_t>(shape_.max_sequences);
  ISOBIT_ASSIGN_OR_RETURN(ids_, device_.Allocate(rows * sizeof(int32_t)));
  if (shape_.num_ranks > 1) {
    const size_t most = CeilDiv(rows, num_ranks());
    ISOBIT_ASSIGN_OR_RETURN(
        whole_rows_, device_.Allocate(most * static_cast<size_t>(shape_.vocab) * sizeof(float)));
  }
  for (Slot& slot : slots_) {
    ISOBIT_RETURN_IF_ERROR(slot.log_probs.Reserve(shape_.max_sequences, device_.stream()));
  }
  return absl::OkStatus();
}

float* StepDraws::logits() const {
  return reinterpret_cast<float*>(exchange_.own(ExchangeBuffer::kLogits));
}

size_t StepDraws::bytes() const {
  size_t bytes = 0;
  for (const Slot& slot : slots_) bytes += slot.log_probs.device_bytes();
  return bytes;
}

LogProbsArgs StepDraws::Args(const std::vector<LogProbRequest>& requests, size_t begin, size_t end,
                             const float* logits, int64_t columns) const {
  return {.logits = logits,
          .ld = columns,
          .requests = requests.data() + begin,
          .num_rows = static_cast<int64_t>(end - begin),
          .vocab = shape_.vocab};
}

std::pair<size_t, size_t> StepDraws::RowsOf(size_t num_rows, int rank) const {
  const auto r = static_cast<size_t>(rank);
  return {num_rows * r / num_ranks(), num_rows * (r + 1) / num_ranks()};
}

absl::Status StepDraws::Launch(const std::vector<LogProbRequest>& requests) {
  Slot& slot = slots_[static_cast<size_t>(num_launched_++) % slots_.size()];
  if (shape_.num_ranks == 1) {
    slot.own_end = requests.size();
    slot.args = Args(requests, 0, requests.size(), logits(), shape_.vocab);
    return slot.log_probs.Launch(slot.args, reinterpret_cast<int32_t*>(ids_.get()),
                                 device_.stream());
  }
  // Penalties' counts grow with every token, and by ranges each rank would copy those of all rows.
  const bool by_ranges =
      !requests.empty() &&
      std::none_of(requests.begin(), requests.end(), [](const LogProbRequest& request) {
        return cuda::IsRanked(request) || !request.sampling.counts.empty();
      });
  return by_ranges ? DrawByRanges(requests, slot) : DrawByRows(requests, slot);
}

absl::Status StepDraws::DrawByRanges(const std::vector<LogProbRequest>& requests, Slot& slot) {
  const cuda::Stream& stream = device_.stream();
  slot.first_row = 0;
  std::tie(slot.own_begin, slot.own_end) = RowsOf(requests.size(), rank_);
  slot.args = Args(requests, 0, requests.size(), logits(), shape_.columns(rank_));
  ISOBIT_ASSIGN_OR_RETURN(
      const cuda::DeviceLogProbs sent,
      slot.log_probs.Send(slot.args, reinterpret_cast<int32_t*>(ids_.get()), stream));
  const int each = contract::kLeaves / shape_.num_ranks;
  ISOBIT_RETURN_IF_ERROR(cuda::LaunchRangeResults(sent, {.first = rank_ * each, .count = each},
                                                  exchange_.own(ExchangeBuffer::kRangeResults),
                                                  stream));
  ISOBIT_ASSIGN_OR_RETURN(const auto all,
                          exchange_.Share(ExchangeBuffer::kRangeResults,
                                          cuda::RangeResultBytes(slot.args.num_rows, each)));
  cuda::RankRangeResults results = {.num_ranks = shape_.num_ranks};
  std::copy_n(all.begin(), num_ranks(), results.of_rank);
  ISOBIT_RETURN_IF_ERROR(cuda::LaunchJoinLogProbs(sent, results, stream));
  return slot.log_probs.Fetch(slot.args, stream);
}

absl::Status StepDraws::DrawByRows(const std::vector<LogProbRequest>& requests, Slot& slot) {
  const cuda::Stream& stream = device_.stream();
  const auto [begin, end] = RowsOf(requests.size(), rank_);
  slot.first_row = begin;
  slot.own_begin = 0;
  slot.own_end = end - begin;
  auto* const whole = reinterpret_cast<float*>(whole_rows_.get());
  slot.args = Args(requests, begin, end, whole, shape_.vocab);
  ISOBIT_ASSIGN_OR_RETURN(
      const auto all_logits,
      exchange_.Share(
          ExchangeBuffer::kLogits,
          requests.size() * static_cast<size_t>(shape_.most_columns()) * sizeof(float)));
  cuda::RankColumns columns = {.num_ranks = shape_.num_ranks};
  for (size_t r = 0; r < num_ranks(); ++r) {
    columns.of_rank[r] = reinterpret_cast<const float*>(all_logits[r]);
    columns.begin[r + 1] = shape_.first_column[r + 1];
  }
  ISOBIT_RETURN_IF_ERROR(cuda::LaunchGatherRows(columns, static_cast<int64_t>(slot.first_row),
                                                slot.args.num_rows, whole, stream));
  auto* const draws = reinterpret_cast<int32_t*>(exchange_.own(ExchangeBuffer::kDraws));
  ISOBIT_RETURN_IF_ERROR(slot.log_probs.Launch(slot.args, draws + slot.first_row, stream));
  ISOBIT_ASSIGN_OR_RETURN(const auto all_draws, exchange_.Share(ExchangeBuffer::kDraws,
                                                                requests.size() * sizeof(int32_t)));
  cuda::RankDraws gathered = {.num_ranks = shape_.num_ranks};
  for (size_t r = 0; r < num_ranks(); ++r) {
    gathered.of_rank[r] = reinterpret_cast<const int32_t*>(all_draws[r]);
    gathered.begin[r + 1] =
        static_cast<int32_t>(RowsOf(requests.size(), static_cast<int>(r)).second);
  }
  return cuda::LaunchGatherDraws(gathered, reinterpret_cast<int32_t*>(ids_.get()), stream);
}

void StepDraws::Collect(ModelStep& step) {
  Slot& slot = slots_[static_cast<size_t>(num_collected_++) % slots_.size()];
  slot.args.requests = step.requests.data() + slot.first_row;
  slot.args.results = step.results.data() + slot.first_row;
  slot.log_probs.Read(slot.args, static_cast<int64_t>(slot.own_begin),
                      static_cast<int64_t>(slot.own_end));
}

}  // namespace isobit
