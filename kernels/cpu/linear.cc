// How a linear layer becomes a product over packed leaves.
#include "kernels/cpu/linear.h"

#include <algorithm>

#include "common/base/round_up.h"
#include "kernels/contract/constants.h"
#include "kernels/contract/vanilla.h"
#include "kernels/cpu/context.h"
#include "kernels/host_kernels.h"

namespace isobit::cpu {
namespace {

KSegments LeavesOf(const LinearShape& shape, const PackedLayout& layout) {
  KSegments segments;
  segments.count = shape.num_leaves;
  segments.sum = shape.sum == contract::LeafSum::kTree ? SegmentSum::kTree : SegmentSum::kChain;
  std::copy_n(layout.begins, shape.num_leaves + 1, segments.bounds);
  return segments;
}

// Copies x so that each leaf starts at its column in the packed weight, and fills ragged ends with
// +0.
void PadLeaves(const LinearArgs& args, const PackedLayout& layout, Bf16* out) {
  const LinearShape& shape = args.weight.shape;
  for (int64_t m = 0; m < args.m; ++m) {
    for (int l = 0; l < shape.num_leaves; ++l) {
      const int64_t columns = shape.bounds[l + 1] - shape.bounds[l];
      Bf16* leaf = out + m * layout.padded_k + layout.begins[l];
      std::copy_n(args.x + m * args.ldx + shape.bounds[l], columns, leaf);
      std::fill(leaf + columns, out + m * layout.padded_k + layout.begins[l + 1], Bf16{0});
    }
  }
}

}  // namespace

PackedLayout::PackedLayout(const LinearShape& shape)
    : panels(CeilDiv(shape.n, kPanelColumns)), padded_k(0) {
  for (int l = 0; l < shape.num_leaves; ++l) {
    begins[l] = padded_k;
    padded_k += RoundUp(shape.bounds[l + 1] - shape.bounds[l], contract::kMmaK);
  }
  begins[shape.num_leaves] = padded_k;
  ranges_offset = static_cast<size_t>(panels * padded_k * kPanelColumns) * sizeof(Bf16);
  bytes =
      ranges_offset + static_cast<size_t>((shape.num_leaves + 1) * panels) * sizeof(ExponentRange);
}

void PackLinear(const LinearShape& shape, const Bf16* w, int64_t ldw, std::byte* packed) {
  const PackedLayout layout(shape);
  auto* data = reinterpret_cast<Bf16*>(packed);
  auto* ranges = reinterpret_cast<ExponentRange*>(packed + layout.ranges_offset);
  for (int64_t p = 0; p < layout.panels; ++p) {
    const int64_t rows = std::min(kPanelColumns, shape.n - p * kPanelColumns);
    ExponentRange whole;
    for (int l = 0; l < shape.num_leaves; ++l) {
      const ExponentRange range =
          PackPanel(w + p * kPanelColumns * ldw + shape.bounds[l], ldw, rows,
                    shape.bounds[l + 1] - shape.bounds[l],
                    data + (p * layout.padded_k + layout.begins[l]) * kPanelColumns);
      ranges[l * layout.panels + p] = range;
      whole.min_nonzero = std::min(whole.min_nonzero, range.min_nonzero);
      whole.max = std::max(whole.max, range.max);
    }
    ranges[shape.num_leaves * layout.panels + p] = whole;
  }
}

LinearOp::LinearOp(MmaPanelsFn mma, const RowKernels& rows, ThreadPool& pool)
    : product_(mma, rows, pool) {}

void LinearOp::Run(const LinearArgs& args) {
  const PackedLayout layout(args.weight.shape);
  Run(args, layout, LeavesOf(args.weight.shape, layout));
}

void LinearOp::Run(const LinearArgs& args, const PackedLayout& layout, const KSegments& segments) {
  const LinearShape& shape = args.weight.shape;
  SegmentedProduct product;
  product.x = args.x;
  product.ldx = args.ldx;
  if (!std::equal(layout.begins, layout.begins + shape.num_leaves + 1, shape.bounds)) {
    padded_x_.resize(static_cast<size_t>(args.m * layout.padded_k));
    PadLeaves(args, layout, padded_x_.data());
    product.x = padded_x_.data();
    product.ldx = layout.padded_k;
  }
  product.m = args.m;
  product.panels = reinterpret_cast<const Bf16*>(args.weight.packed);
  product.n = shape.n;
  product.padded_k = layout.padded_k;
  product.bounds = {segments.bounds, static_cast<size_t>(segments.count) + 1};
  product.sum = segments.sum;
  product.ranges =
      reinterpret_cast<const ExponentRange*>(args.weight.packed + layout.ranges_offset);
  product.range_stride = layout.panels;
  if (!segments.are_leaves) {
    product.ranges += shape.num_leaves * layout.panels;
    product.range_stride = 0;
  }
  product.bias = args.bias;
  product.bf16_out = args.bf16_out;
  product.fp32_out = args.fp32_out;
  product.ldy = args.ldy;
  product_.Run(product);
}

namespace {

// Mode vanilla: the number of rows determines how K is split (contract/vanilla.h).
absl::Status RunVanilla(const LinearArgs& a, Context& context) {
  const PackedLayout layout(a.weight.shape);
  const int64_t steps = layout.padded_k / contract::kMmaK;
  KSegments splits;
  splits.count = contract::VanillaSplits(a.m);
  splits.sum = SegmentSum::kZeroChain;
  splits.are_leaves = false;
  for (int i = 0; i <= splits.count; ++i) {
    splits.bounds[i] = i * steps / splits.count * contract::kMmaK;
  }
  context.linear.Run(a, layout, splits);
  return absl::OkStatus();
}

}  // namespace

absl::Status Run(const LinearArgs& a, Context& context) {
  if (a.swiglu_out != nullptr) {
    return LinearThenSwiGlu(
        a, context.gate_up, [&](const LinearArgs& b) { return Run(b, context); },
        [&](const SwiGluArgs& b) { return Run(b, context); });
  }
  if (context.mode == NumericsMode::kVanilla) return RunVanilla(a, context);
  context.linear.Run(a);
  return absl::OkStatus();
}

absl::Status Run(const CopyPagesArgs& a, Context& /*context*/) {
  CopyHostPages(a);
  return absl::OkStatus();
}

}  // namespace isobit::cpu
