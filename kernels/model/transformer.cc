// The loop over blocks: weights, norms, halves.
#include "kernels/model/transformer.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "common/base/status_macros.h"

namespace isobit {
namespace {

// The columns of each matrix of activations: those of the block that needs the most.
std::vector<int64_t> WidthsOf(const WeightLayout& layout) {
  std::vector<int64_t> widths;
  for (size_t b = 0; b < layout.plan().blocks.size(); ++b) {
    const BlockWeights shapes = layout.Bind(static_cast<int>(b) + 1, nullptr);
    const std::vector<int64_t> needed = layout.plan().blocks[b]->Activations(shapes);
    widths.resize(std::max(widths.size(), needed.size()));
    for (size_t i = 0; i < needed.size(); ++i) widths[i] = std::max(widths[i], needed[i]);
  }
  return widths;
}

}  // namespace

Transformer::Transformer(const WeightLayout& layout, const contract::RopeTable& rope, Backend& ops,
                         AllReduce* all_reduce)
    : layout_(layout),
      blocks_(layout.plan().blocks),
      rope_(rope),
      ops_(ops),
      residual_(layout.config().hidden_size, layout.config().rms_norm_eps, blocks_.size(), ops,
                all_reduce) {}

void Transformer::ShareMemory(const Transformer& other) {
  residual_.ShareMemory(other.residual_);
  activations_ = other.activations_;
  cosine_ = other.cosine_;
  sine_ = other.sine_;
}

absl::Status Transformer::Reserve(int64_t rows) {
  ISOBIT_RETURN_IF_ERROR(residual_.Reserve(rows));
  const std::vector<int64_t> widths = WidthsOf(layout_);
  activations_->resize(widths.size());
  for (size_t i = 0; i < widths.size(); ++i) {
    ISOBIT_RETURN_IF_ERROR((*activations_)[i].Reserve(ops_.device(), rows * widths[i]));
  }
  return cosine_ == nullptr ? ShareRope() : absl::OkStatus();
}

absl::Status Transformer::PrepareProbe(int64_t rows) {
  probed_ops_ = std::make_unique<ProbedOps>(layout_, ops_);
  return probed_ops_->Reserve(rows);
}

size_t Transformer::ReservedBytes(const WeightLayout& layout, int64_t rows) {
  int64_t columns = 0;
  for (const int64_t width : WidthsOf(layout)) columns += width;
  return ResidualStream::ReservedBytes(layout.config().hidden_size, layout.plan().blocks.size(),
                                       rows) +
         static_cast<size_t>(rows * columns) * sizeof(Bf16);
}

absl::Status Transformer::ShareRope() {
  const auto share = [this](const std::vector<float>& table) {
    const auto* bytes = reinterpret_cast<const std::byte*>(table.data());
    return ops_.device().Share({std::shared_ptr<const void>(), bytes},
                               table.size() * sizeof(float));
  };
  ISOBIT_ASSIGN_OR_RETURN(cosine_, share(rope_.cosine));
  ISOBIT_ASSIGN_OR_RETURN(sine_, share(rope_.sine));
  return absl::OkStatus();
}

const Bf16* Transformer::NormOf(size_t b, const std::byte* bytes) const {
  const ParameterIndex norm = b < blocks_.size() ? blocks_[b]->norm() : layout_.plan().head->norm();
  return layout_.Bind(static_cast<int>(b) + 1, bytes).bf16(norm);
}

absl::Status Transformer::Forward(const Batch& batch, WeightSource& weights, const KvCache& cache,
                                  Bf16* hidden) {
  ISOBIT_ASSIGN_OR_RETURN(
      const UploadedStep step,
      ops_.tables().Upload(batch.ids, batch.sequences, cache.size().page_size, batch.writes_past));
  return Forward(step, static_cast<int64_t>(batch.ids.size()), weights, cache, hidden);
}

absl::Status Transformer::Forward(const UploadedStep& step, int64_t rows, WeightSource& weights,
                                  const KvCache& cache, Bf16* hidden) {
  const int64_t width = layout_.config().hidden_size;
  ISOBIT_RETURN_IF_ERROR(Reserve(rows));
  // A pass in halves would not leave the residual whole on each rank, for the probe to see.
  ISOBIT_RETURN_IF_ERROR(
      residual_.Begin(step, rows, cache.size().page_size, /*may_cut=*/probe_ == nullptr));
  ISOBIT_ASSIGN_OR_RETURN(HeldBlock held, HeldBlock::Acquire(weights, 0));
  ISOBIT_RETURN_IF_ERROR(layout_.plan().embedding->Forward(ops_, layout_.Bind(0, held.bytes()),
                                                           step.ids, rows, residual_.data()));
  if (probe_ != nullptr) {
    ISOBIT_RETURN_IF_ERROR(
        probe_->SeeWhole({0, ProbeOp::kEmbedding}, residual_.data(), rows, width));
  }
  // In halves a block uses the norm of the next one, too, whose weights are then acquired early.
  std::optional<HeldBlock> next;
  const auto advance = [&](size_t b) -> absl::Status {
    held.Release();
    if (!next) {
      ISOBIT_ASSIGN_OR_RETURN(next, HeldBlock::Acquire(weights, static_cast<int>(b) + 1));
    }
    held = *std::exchange(next, std::nullopt);
    return absl::OkStatus();
  };
  for (size_t b = 0; b <= blocks_.size(); ++b) {
    ISOBIT_RETURN_IF_ERROR(advance(b));
    const Bf16* next_norm = nullptr;
    if (residual_.num_halves() > 1 && b < blocks_.size()) {
      ISOBIT_ASSIGN_OR_RETURN(next, HeldBlock::Acquire(weights, static_cast<int>(b) + 2));
      next_norm = NormOf(b + 1, next->bytes());
    }
    residual_.BeginBlock(NormOf(b, held.bytes()), next_norm);
    if (b < blocks_.size()) ISOBIT_RETURN_IF_ERROR(RunBlock(b, held.bytes(), cache));
  }
  for (size_t h = 0; h < residual_.num_halves(); ++h) {
    const StepRows& half = residual_.half(h);
    Bf16* const out = hidden + half.first_row * width;
    ISOBIT_ASSIGN_OR_RETURN(const Bf16* x, residual_.Norm(h, out));
    ISOBIT_RETURN_IF_ERROR(SeeNorm(blocks_.size(), x));
    if (x == out) continue;
    const auto bytes = static_cast<size_t>(half.rows * width) * sizeof(Bf16);
    ISOBIT_RETURN_IF_ERROR(ops_.device().Copy(out, x, bytes));
  }
  return absl::OkStatus();
}

absl::Status Transformer::RunBlock(size_t b, const std::byte* bytes, const KvCache& cache) {
  const Block& block = *blocks_[b];
  const int number = static_cast<int>(b) + 1;
  const BlockWeights weights = layout_.Bind(number, bytes);
  const std::vector<int64_t> widths = block.Activations(weights);
  const Rope rope = {reinterpret_cast<const float*>(cosine_.get()),
                     reinterpret_cast<const float*>(sine_.get())};
  if (probe_ != nullptr) probed_ops_->BeginBlock(number, bytes, *probe_);
  std::vector<Bf16*> activations(widths.size());
  for (size_t h = 0; h < residual_.num_halves(); ++h) {
    const StepRows& half = residual_.half(h);
    ISOBIT_ASSIGN_OR_RETURN(const Bf16* normed, residual_.Norm(h));
    ISOBIT_RETURN_IF_ERROR(SeeNorm(b, normed));
    for (size_t i = 0; i < widths.size(); ++i) {
      activations[i] = (*activations_)[i].data() + half.first_row * widths[i];
    }
    const OpTable& ops = probe_ != nullptr ? static_cast<const OpTable&>(*probed_ops_) : ops_;
    ISOBIT_RETURN_IF_ERROR(block.Forward({.ops = ops,
                                          .rank = layout_.shape(),
                                          .weights = weights,
                                          .rope = rope,
                                          .state = cache.of_block(b),
                                          .half = h,
                                          .rows = half,
                                          .normed = normed,
                                          .activations = activations,
                                          .residual = residual_}));
  }
  return absl::OkStatus();
}

absl::Status Transformer::SeeNorm(size_t b, const Bf16* normed) {
  if (probe_ == nullptr) return absl::OkStatus();
  const int64_t rows = residual_.half(0).rows;
  const int64_t width = layout_.config().hidden_size;
  // Before the first block nothing has been added to the embedding.
  if (b > 0) {
    const Block& before = *blocks_[b - 1];
    const ProbeOp sum = before.index_in_layer() == 0 ? ProbeOp::kAttentionSum : ProbeOp::kMlpSum;
    ISOBIT_RETURN_IF_ERROR(probe_->SeeWhole({before.layer(), sum}, residual_.data(), rows, width));
  }
  ProbeSite site = {layout_.config().num_layers, ProbeOp::kFinalNorm};
  if (b < blocks_.size()) {
    site = {blocks_[b]->layer(),
            blocks_[b]->index_in_layer() == 0 ? ProbeOp::kInputNorm : ProbeOp::kPostNorm};
  }
  return probe_->SeeWhole(site, normed, rows, width);
}

absl::Status Transformer::Logits(const Bf16* hidden, int64_t rows, WeightSource& weights,
                                 float* logits, int64_t ld) {
  ISOBIT_ASSIGN_OR_RETURN(const HeldBlock held, HeldBlock::Acquire(weights, layout_.head_block()));
  return layout_.plan().head->Logits(ops_, layout_.Bind(layout_.head_block(), held.bytes()), hidden,
                                     rows, logits, ld);
}

}  // namespace isobit
