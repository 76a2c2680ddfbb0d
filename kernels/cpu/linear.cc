// The loops around mma_panel that make a linear layer: leaves, blocks, combination, rounding.
#include "kernels/cpu/linear.h"

#include <algorithm>
#include <cstring>

#include "common/base/round_up.h"
#include "kernels/contract/constants.h"

namespace isobit::cpu {
namespace {

// A block of outputs is computed segment by segment, so that a segment's weights stay in cache for
// all rows. The block's sums (8 segments x 16 rows x 256 columns of fp32) fit in L2.
constexpr int64_t kBlockRows = 16;
constexpr int64_t kBlockPanels = 8;

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
    : mma_(mma), rows_(rows), pool_(pool), sums_(static_cast<size_t>(pool.num_threads())) {}

void LinearOp::Run(const LinearArgs& args) {
  const PackedLayout layout(args.weight.shape);
  Run(args, layout, LeavesOf(args.weight.shape, layout));
}

void LinearOp::Run(const LinearArgs& args, const PackedLayout& layout, const KSegments& segments) {
  const LinearShape& shape = args.weight.shape;
  const auto* data = reinterpret_cast<const Bf16*>(args.weight.packed);
  const auto* ranges =
      reinterpret_cast<const ExponentRange*>(args.weight.packed + layout.ranges_offset);

  const Bf16* x = args.x;
  int64_t ldx = args.ldx;
  if (!std::equal(layout.begins, layout.begins + shape.num_leaves + 1, shape.bounds)) {
    padded_x_.resize(static_cast<size_t>(args.m * layout.padded_k));
    PadLeaves(args, layout, padded_x_.data());
    x = padded_x_.data();
    ldx = layout.padded_k;
  }

  // A block has enough panels to make reading x once worthwhile, but fewer if threads would idle.
  const int64_t row_blocks = CeilDiv(args.m, kBlockRows);
  const int64_t wanted_blocks = pool_.num_threads() > 1 ? 4 * pool_.num_threads() : 1;
  const int64_t block_panels =
      std::clamp(layout.panels * row_blocks / wanted_blocks, int64_t{1}, kBlockPanels);
  const int64_t ldc = block_panels * kPanelColumns;

  const auto run_block = [&](int64_t panel_block, int64_t row_block, std::vector<float>& sums) {
    const int64_t panel = panel_block * block_panels;
    const int64_t panels = std::min(block_panels, layout.panels - panel);
    const int64_t row = row_block * kBlockRows;
    const int64_t rows = std::min(kBlockRows, args.m - row);
    const int64_t stride = rows * ldc;
    sums.assign(static_cast<size_t>(segments.count * stride), 0.0f);
    for (int i = 0; i < segments.count; ++i) {
      const int64_t begin = segments.bounds[i];
      const int64_t k = segments.bounds[i + 1] - begin;
      if (k == 0) continue;
      const int range_row = segments.are_leaves ? i : shape.num_leaves;
      mma_({.w = {.data = data + (panel * layout.padded_k + begin) * kPanelColumns,
                  .panel_stride = layout.padded_k * kPanelColumns,
                  .k_stride = kPanelColumns,
                  .ranges = ranges + range_row * layout.panels + panel},
            .panels = panels,
            .x = x + row * ldx + begin,
            .ldx = ldx,
            .rows = rows,
            .k = k,
            .c = sums.data() + i * stride,
            .ldc = ldc});
    }
    const int64_t column = panel * kPanelColumns;
    const int64_t columns = std::min(panels * kPanelColumns, shape.n - column);
    for (int64_t r = 0; r < rows; ++r) {
      float* total = sums.data() + r * ldc;
      rows_.join_segments(segments.sum, total, stride, segments.count,
                          args.bias != nullptr ? args.bias + column : nullptr, columns);
      const int64_t out = (row + r) * args.ldy + column;
      if (args.bf16_out != nullptr) {
        rows_.to_bf16(total, args.bf16_out + out, columns);
      } else {
        std::copy_n(total, columns, args.fp32_out + out);
      }
    }
  };
  pool_.ParallelFor(CeilDiv(layout.panels, block_panels) * row_blocks, 1,
                    [&](int64_t begin, int64_t end, int worker) {
                      for (int64_t i = begin; i < end; ++i) {
                        run_block(i / row_blocks, i % row_blocks,
                                  sums_[static_cast<size_t>(worker)]);
                      }
                    });
}

}  // namespace isobit::cpu
