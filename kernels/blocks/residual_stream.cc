// Adds and norms, and which half's sum runs when.
#include "kernels/blocks/residual_stream.h"

#include <utility>

#include "common/base/check.h"
#include "common/base/status_macros.h"
#include "kernels/ops/linear.h"
#include "kernels/ops/rms_norm.h"

namespace isobit {

ResidualStream::ResidualStream(int64_t hidden, float eps, size_t num_blocks, Backend& ops,
                               AllReduce* all_reduce)
    : hidden_(hidden), eps_(eps), num_blocks_(num_blocks), ops_(ops), all_reduce_(all_reduce) {
  ISOBIT_CHECK(all_reduce == nullptr || num_blocks > 1) << "the next step's sums need other memory";
}

absl::Status ResidualStream::Reserve(int64_t rows) {
  Device& device = ops_.device();
  const int64_t partial_bytes =
      rows * hidden_ * static_cast<int64_t>(has_bf16_partials() ? sizeof(Bf16) : sizeof(float));
  ISOBIT_RETURN_IF_ERROR(buffers_->residual.Reserve(device, rows * hidden_));
  ISOBIT_RETURN_IF_ERROR(buffers_->normed.Reserve(device, rows * hidden_));
  ISOBIT_RETURN_IF_ERROR(buffers_->partial[0].Reserve(device, partial_bytes));
  ISOBIT_RETURN_IF_ERROR(buffers_->partial[1].Reserve(device, partial_bytes));
  if (num_blocks_ % 2 == 1) {
    ISOBIT_RETURN_IF_ERROR(buffers_->partial[2].Reserve(device, partial_bytes));
  }
  return buffers_->bias.Reserve(device, 2 * hidden_);
}

size_t ResidualStream::ReservedBytes(int64_t hidden, size_t num_blocks, int64_t rows) {
  return static_cast<size_t>(rows * hidden) *
         (2 * sizeof(Bf16) + (2 + num_blocks % 2) * sizeof(float));
}

absl::Status ResidualStream::Begin(const UploadedStep& step, int64_t rows, int32_t page_size,
                                   bool may_cut) {
  halves_ = {{.step = {.first_row = 0, .rows = rows, .sequences = step.sequences}}};
  overlapped_ = nullptr;
  num_begun_ = 0;
  const absl::Span<const SequenceRows> sequences = step.sequences.host;
  // Rows of padding have no sequence that could be cut.
  const bool whole =
      !sequences.empty() && sequences.back().first_row + sequences.back().num_rows == rows;
  if (!may_cut || !whole || rows < 2 || all_reduce_ == nullptr) return absl::OkStatus();
  overlapped_ = all_reduce_->Overlapped(rows);
  if (overlapped_ == nullptr) return absl::OkStatus();
  cut_ = CutStep(sequences);
  halves_.clear();
  for (int h = 0; h < 2; ++h) {
    const StepHalf& half = cut_.half[h];
    ISOBIT_ASSIGN_OR_RETURN(const SequenceTable table,
                            ops_.tables().UploadHalf(h, half.sequences, page_size));
    halves_.push_back(
        {.step = {.first_row = half.first_row, .rows = half.num_rows, .sequences = table}});
  }
  return absl::OkStatus();
}

absl::Status ResidualStream::Add(size_t h, const Bf16* x, const LinearWeight& weight,
                                 const float* bias) {
  ISOBIT_RETURN_IF_ERROR(SumHalfBefore(h));
  Half& half = halves_[h];
  const size_t element = has_bf16_partials() ? sizeof(Bf16) : sizeof(float);
  const size_t block = num_begun_ - 1;
  const bool is_odd_end = num_blocks_ % 2 == 1 && block + 1 == num_blocks_;
  std::byte* const partial = buffers_->partial[is_odd_end ? 2 : block % 2].data() +
                             static_cast<size_t>(half.step.first_row * hidden_) * element;
  LinearArgs args = {
      .x = x, .ldx = weight.shape.k, .m = half.step.rows, .weight = weight, .ldy = hidden_};
  if (has_bf16_partials()) {
    args.bf16_out = reinterpret_cast<Bf16*>(partial);
  } else {
    args.fp32_out = reinterpret_cast<float*>(partial);
    if (all_reduce_ != nullptr && overlapped_ == nullptr) {
      args.push = all_reduce_->Push(half.step.rows);
    }
  }
  ISOBIT_RETURN_IF_ERROR(ops_.Run(args));
  half.partial = partial;
  half.bias = nullptr;
  if (bias != nullptr) {
    float* const copy = buffers_->bias.data() + static_cast<int64_t>(h) * hidden_;
    ISOBIT_RETURN_IF_ERROR(
        ops_.device().Copy(copy, bias, static_cast<size_t>(hidden_) * sizeof(float)));
    half.bias = copy;
  }
  if (overlapped_ == nullptr) return absl::OkStatus();
  half.travels = true;
  return overlapped_->Send(static_cast<int>(h), args.fp32_out, half.step.rows);
}

absl::StatusOr<const Bf16*> ResidualStream::Norm(size_t h, Bf16* out) {
  Half& half = halves_[h];
  if (half.travels) {
    ISOBIT_RETURN_IF_ERROR(Sum(h, norm_));
    half.travels = false;
    return overlapped_->Receive(static_cast<int>(h));
  }
  const std::byte* const partial = std::exchange(half.partial, nullptr);
  RmsNormArgs args = NormArgs(half, norm_, out);
  if (partial != nullptr && all_reduce_ != nullptr) {
    ISOBIT_RETURN_IF_ERROR(all_reduce_->Norm(partial, args));
    return out;
  }
  args.sum = reinterpret_cast<const float*>(partial);
  ISOBIT_RETURN_IF_ERROR(ops_.Run(args));
  return out;
}

absl::Status ResidualStream::SumHalfBefore(size_t h) {
  const size_t before = halves_.size() - 1 - h;
  if (!halves_[before].travels) return absl::OkStatus();
  // The other half's next norm is this block's while half 0 is computed, and then the next one's.
  return Sum(before, h == 0 ? norm_ : next_norm_);
}

absl::Status ResidualStream::Sum(size_t h, const Bf16* weight) {
  Half& half = halves_[h];
  if (std::exchange(half.partial, nullptr) == nullptr) return absl::OkStatus();
  Bf16* const out = buffers_->normed.data() + half.step.first_row * hidden_;
  return overlapped_->Sum(static_cast<int>(h), NormArgs(half, weight, out));
}

RmsNormArgs ResidualStream::NormArgs(const Half& half, const Bf16* weight, Bf16* out) const {
  return {.residual = buffers_->residual.data() + half.step.first_row * hidden_,
          .bias = half.bias,
          .weight = weight,
          .out = out,
          .rows = half.step.rows,
          .hidden = hidden_,
          .eps = eps_};
}

}  // namespace isobit
