// Which columns of the whole model's results a rank's results are.
#include "kernels/model/probed_ops.h"

#include <algorithm>
#include <vector>

#include "common/base/status_macros.h"

namespace isobit {
namespace {

// The rank's outputs of each tensor of a linear layer.
std::vector<ForwardProbe::Columns> OutputsOf(const Parameter& parameter, const RankShape& rank) {
  std::vector<ForwardProbe::Columns> outputs;
  int64_t from = 0, first = 0;
  for (const TensorSpec& tensor : parameter.tensors) {
    const Interval rows = SliceOf(parameter, tensor, rank).rows;
    outputs.push_back({from, rows.size(), first + rows.begin});
    from += rows.size();
    first += tensor.shape[0];
  }
  return outputs;
}

}  // namespace

ProbedOps::ProbedOps(const WeightLayout& layout, Backend& ops)
    : OpTable(ops), layout_(layout), ops_(ops) {
  Replace<LinearArgs>(*this);
  Replace<QkvArgs>(*this);
  Replace<AttentionArgs>(*this);
}

absl::Status ProbedOps::Reserve(int64_t rows) {
  return product_.Reserve(ops_.device(), rows * layout_.WidestGated());
}

void ProbedOps::BeginBlock(int block, const std::byte* bytes, ForwardProbe& probe) {
  block_ = block;
  bytes_ = bytes;
  probe_ = &probe;
}

ProbeSite ProbedOps::SiteOf(ProbeOp op) const {
  return {layout_.plan().blocks[static_cast<size_t>(block_ - 1)]->layer(), op};
}

ForwardProbe::Columns ProbedOps::Queries() const {
  const ModelConfig& config = layout_.config();
  const int64_t columns_of_kv_head =
      int64_t{config.num_heads} / config.num_kv_heads * config.head_dim;
  const Interval& kv_heads = layout_.shape().kv_heads;
  return {0, kv_heads.size() * columns_of_kv_head, kv_heads.begin * columns_of_kv_head};
}

absl::Status ProbedOps::On(const LinearArgs& args) {
  ISOBIT_RETURN_IF_ERROR(ops_.Run(args));
  const BlockWeights weights = layout_.Bind(block_, bytes_);
  const std::vector<Parameter>& parameters = layout_.plan().parameters[static_cast<size_t>(block_)];
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].op != ParameterOp::kLinear) continue;
    const LinearWeight weight = weights.linear(static_cast<ParameterIndex>(i));
    if (weight.packed != args.weight.packed) continue;
    auto outputs = OutputsOf(parameters[i], layout_.shape());
    if (args.bf16_out != nullptr) {
      return probe_->SeeColumns(SiteOf(ProbeOp::kQkv), args.bf16_out, args.m, args.ldy, outputs);
    }
    LinearArgs again = args;
    again.swiglu_out = nullptr;
    again.bf16_out = product_.data();
    again.ldy = weight.shape.n;
    ISOBIT_RETURN_IF_ERROR(ops_.Run(again));
    const auto see = [&](ProbeOp op, const Bf16* data, int64_t ld, int64_t from) {
      const ForwardProbe::Columns columns = {from, outputs[0].count, outputs[0].first};
      return probe_->SeeColumns(SiteOf(op), data, args.m, ld, {columns});
    };
    ISOBIT_RETURN_IF_ERROR(see(ProbeOp::kGate, again.bf16_out, again.ldy, 0));
    ISOBIT_RETURN_IF_ERROR(see(ProbeOp::kUp, again.bf16_out, again.ldy, outputs[1].from));
    return see(ProbeOp::kActivation, args.swiglu_out, args.ldy, 0);
  }
  return absl::OkStatus();
}

absl::Status ProbedOps::On(const QkvArgs& args) {
  ISOBIT_RETURN_IF_ERROR(ops_.Run(args));
  const SequenceRows& sequence = args.sequences.host.front();
  ISOBIT_RETURN_IF_ERROR(
      probe_->SeeColumns(SiteOf(ProbeOp::kQ), args.qkv, sequence.num_rows, args.ld, {Queries()}));
  return probe_->SeeCache(SiteOf(ProbeOp::kK).layer, args.kv, sequence);
}

absl::Status ProbedOps::On(const AttentionArgs& args) {
  ISOBIT_RETURN_IF_ERROR(ops_.Run(args));
  return probe_->SeeColumns(SiteOf(ProbeOp::kAttention), args.out,
                            args.sequences.host.front().num_rows, args.ldo, {Queries()});
}

}  // namespace isobit
