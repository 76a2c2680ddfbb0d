// The blocks of a product, their segments, the segments' combination and rounding.
#include "kernels/cpu/segmented_product.h"

#include <algorithm>

#include "common/base/round_up.h"

namespace isobit::cpu {
namespace {

// A block of outputs is computed segment by segment, so that a segment's weights stay in cache for
// all rows. The block's sums (8 segments x 16 rows x 256 columns of fp32) fit in L2.
constexpr int64_t kBlockRows = 16;
constexpr int64_t kBlockPanels = 8;

}  // namespace

// Rows [row, row + rows) of panels [panel, panel + panels).
struct SegmentedProductOp::Block {
  int64_t row;
  int64_t rows;
  int64_t panel;
  int64_t panels;
  int64_t ldc;  // columns of the sums
};

SegmentedProductOp::SegmentedProductOp(MmaPanelsFn mma, const RowKernels& rows, ThreadPool& pool)
    : mma_(mma), rows_(rows), pool_(pool), sums_(static_cast<size_t>(pool.num_threads())) {}

void SegmentedProductOp::Run(const SegmentedProduct& p) {
  // A block has enough panels to make reading x once worthwhile, but fewer if threads would idle.
  const int64_t all_panels = CeilDiv(p.n, kPanelColumns);
  const int64_t row_blocks = CeilDiv(p.m, kBlockRows);
  const int64_t wanted_blocks = pool_.num_threads() > 1 ? 4 * pool_.num_threads() : 1;
  const int64_t block_panels =
      std::clamp(all_panels * row_blocks / wanted_blocks, int64_t{1}, kBlockPanels);
  pool_.ParallelFor(CeilDiv(all_panels, block_panels) * row_blocks, 1,
                    [&](int64_t begin, int64_t end, int worker) {
                      for (int64_t i = begin; i < end; ++i) {
                        Block block;
                        block.panel = i / row_blocks * block_panels;
                        block.panels = std::min(block_panels, all_panels - block.panel);
                        block.row = i % row_blocks * kBlockRows;
                        block.rows = std::min(kBlockRows, p.m - block.row);
                        block.ldc = block_panels * kPanelColumns;
                        RunBlock(p, block, sums_[static_cast<size_t>(worker)]);
                      }
                    });
}

void SegmentedProductOp::RunBlock(const SegmentedProduct& p, const Block& b,
                                  std::vector<float>& sums) const {
  const auto segments = static_cast<int>(p.bounds.size()) - 1;
  const int64_t stride = b.rows * b.ldc;
  const int64_t column = b.panel * kPanelColumns;
  const int64_t columns = std::min(b.panels * kPanelColumns, p.n - column);
  sums.assign(static_cast<size_t>(segments * stride), 0.0f);
  for (int64_t r = 0; p.start != nullptr && r < b.rows; ++r) {
    std::copy_n(p.start + (b.row + r) * p.ldy + column, columns, sums.data() + r * b.ldc);
  }
  for (int i = 0; i < segments; ++i) {
    const int64_t begin = p.bounds[static_cast<size_t>(i)];
    const int64_t k = p.bounds[static_cast<size_t>(i) + 1] - begin;
    if (k == 0) continue;
    mma_({.w = {.data = p.panels + (b.panel * p.padded_k + begin) * kPanelColumns,
                .panel_stride = p.padded_k * kPanelColumns,
                .k_stride = kPanelColumns,
                .ranges = p.ranges + i * p.range_stride + b.panel},
          .panels = b.panels,
          .x = p.x + b.row * p.ldx + begin,
          .ldx = p.ldx,
          .rows = b.rows,
          .k = k,
          .c = sums.data() + i * stride,
          .ldc = b.ldc});
  }
  for (int64_t r = 0; r < b.rows; ++r) {
    float* total = sums.data() + r * b.ldc;
    rows_.join_segments(p.sum, total, stride, segments,
                        p.bias != nullptr ? p.bias + column : nullptr, columns);
    const int64_t out = (b.row + r) * p.ldy + column;
    if (p.bf16_out != nullptr) {
      rows_.to_bf16(total, p.bf16_out + out, columns);
    } else {
      std::copy_n(total, columns, p.fp32_out + out);
    }
  }
}

}  // namespace isobit::cpu
