// See residual_stream.h.
#include "kernels/model/residual_stream.h"

#include <utility>

#include "common/base/status_macros.h"

namespace isobit {

absl::Status ResidualStream::Reserve(int64_t rows) {
  Device& device = ops_.device();
  const int64_t partial_bytes =
      rows * hidden_ * static_cast<int64_t>(has_bf16_partials() ? sizeof(Bf16) : sizeof(float));
  ISOBIT_RETURN_IF_ERROR(residual_.Reserve(device, rows * hidden_));
  ISOBIT_RETURN_IF_ERROR(normed_.Reserve(device, rows * hidden_));
  ISOBIT_RETURN_IF_ERROR(partial_[0].Reserve(device, partial_bytes));
  ISOBIT_RETURN_IF_ERROR(partial_[1].Reserve(device, partial_bytes));
  return bias_.Reserve(device, 2 * hidden_);
}

size_t ResidualStream::ReservedBytes(int64_t hidden, int64_t rows) {
  return static_cast<size_t>(rows * hidden) * 2 * (sizeof(Bf16) + sizeof(float));
}

absl::Status ResidualStream::Begin(const UploadedStep& step, int64_t rows, int32_t page_size) {
  parts_ = {{.step = {.first_row = 0, .rows = rows, .sequences = step.sequences}}};
  overlapped_ = nullptr;
  const absl::Span<const SequenceRows> sequences = step.sequences.host;
  // Rows of padding have no sequence that could be cut.
  const bool whole =
      !sequences.empty() && sequences.back().first_row + sequences.back().num_rows == rows;
  if (!whole || rows < 2 || all_reduce_ == nullptr) return absl::OkStatus();
  overlapped_ = all_reduce_->Overlapped(rows);
  if (overlapped_ == nullptr) return absl::OkStatus();
  halves_ = CutStep(sequences);
  parts_.clear();
  for (int h = 0; h < 2; ++h) {
    const StepHalf& half = halves_.half[h];
    ISOBIT_ASSIGN_OR_RETURN(const SequenceTable table,
                            ops_.tables().UploadHalf(h, half.sequences, page_size));
    parts_.push_back(
        {.step = {.first_row = half.first_row, .rows = half.num_rows, .sequences = table}});
  }
  return absl::OkStatus();
}

absl::Status ResidualStream::Add(size_t p, const Bf16* x, const LinearWeight& weight,
                                 const float* bias) {
  Part& part = parts_[p];
  const size_t element = has_bf16_partials() ? sizeof(Bf16) : sizeof(float);
  std::byte* const partial =
      partial_[turn_].data() + static_cast<size_t>(part.step.first_row * hidden_) * element;
  turn_ = 1 - turn_;
  LinearArgs args = {
      .x = x, .ldx = weight.shape.k, .m = part.step.rows, .weight = weight, .ldy = hidden_};
  if (has_bf16_partials()) {
    args.bf16_out = reinterpret_cast<Bf16*>(partial);
  } else {
    args.fp32_out = reinterpret_cast<float*>(partial);
    if (all_reduce_ != nullptr && overlapped_ == nullptr) {
      args.push = all_reduce_->Push(part.step.rows);
    }
  }
  ISOBIT_RETURN_IF_ERROR(ops_.Linear(args));
  part.partial = partial;
  part.bias = nullptr;
  if (bias != nullptr) {
    float* const copy = bias_.data() + static_cast<int64_t>(p) * hidden_;
    ISOBIT_RETURN_IF_ERROR(
        ops_.device().Copy(copy, bias, static_cast<size_t>(hidden_) * sizeof(float)));
    part.bias = copy;
  }
  if (overlapped_ == nullptr) return absl::OkStatus();
  part.travels = true;
  return overlapped_->Send(static_cast<int>(p), args.fp32_out, part.step.rows);
}

absl::StatusOr<const Bf16*> ResidualStream::Norm(size_t p, const Bf16* weight, Bf16* out) {
  Part& part = parts_[p];
  if (part.travels) {
    ISOBIT_RETURN_IF_ERROR(Sum(p, weight));
    part.travels = false;
    return overlapped_->Receive(static_cast<int>(p));
  }
  const std::byte* const partial = std::exchange(part.partial, nullptr);
  RmsNormArgs args = NormArgs(part, weight, out);
  if (partial != nullptr && all_reduce_ != nullptr) {
    ISOBIT_RETURN_IF_ERROR(all_reduce_->Norm(partial, args));
    return out;
  }
  args.sum = reinterpret_cast<const float*>(partial);
  ISOBIT_RETURN_IF_ERROR(ops_.RmsNorm(args));
  return out;
}

absl::Status ResidualStream::SumPartBefore(size_t p, const Bf16* weight) {
  const size_t before = parts_.size() - 1 - p;
  return parts_[before].travels ? Sum(before, weight) : absl::OkStatus();
}

absl::Status ResidualStream::Sum(size_t p, const Bf16* weight) {
  Part& part = parts_[p];
  if (std::exchange(part.partial, nullptr) == nullptr) return absl::OkStatus();
  Bf16* const out = normed_.data() + part.step.first_row * hidden_;
  return overlapped_->Sum(static_cast<int>(p), NormArgs(part, weight, out));
}

RmsNormArgs ResidualStream::NormArgs(const Part& part, const Bf16* weight, Bf16* out) const {
  return {.residual = residual_.data() + part.step.first_row * hidden_,
          .bias = part.bias,
          .weight = weight,
          .out = out,
          .rows = part.step.rows,
          .hidden = hidden_,
          .eps = eps_};
}

}  // namespace isobit
