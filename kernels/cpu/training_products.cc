// Packs operands into panels and calls the product.
#include "kernels/cpu/training_products.h"

#include <algorithm>
#include <cstddef>

#include "common/base/round_up.h"
#include "kernels/contract/constants.h"
#include "kernels/cpu/context.h"

namespace isobit::cpu {
namespace {

// Columns of dy that are transposed at a time: bounds the memory of a weight gradient.
constexpr int64_t kTransposedColumns = 512;

std::vector<const Bf16*> RowsOf(const StackedWeight& weight) {
  std::vector<const Bf16*> rows;
  for (int part = 0; part < weight.parts; ++part) {
    for (int64_t i = 0; i < weight.rows[part]; ++i) {
      rows.push_back(weight.data[part] + i * weight.columns);
    }
  }
  return rows;
}

}  // namespace

PaddedSegments::PaddedSegments(absl::Span<const int64_t> from) : from(from), bounds(1, 0) {
  for (int64_t i = 0; i < count(); ++i) {
    bounds.push_back(bounds.back() + RoundUp(length(i), contract::kMmaK));
  }
}

TrainingProducts::TrainingProducts(MmaPanelsFn mma, const RowKernels& rows, ThreadPool& pool)
    : rows_(rows), pool_(pool), product_(mma, rows, pool) {}

void TrainingProducts::StackedLinear(const StackedLinearArgs& a) {
  const int64_t n = a.weight.n();
  const PaddedSegments k(a.leaves.bounds);
  PackColumns(RowsOf(a.weight), k);
  SegmentedProduct product = ProductOf(n, k);
  SetRows(a.x, a.ldx, a.m, k, &product);
  product.sum = a.sum == contract::LeafSum::kTree ? SegmentSum::kTree : SegmentSum::kChain;
  if (a.residual == nullptr) {
    product.bias = a.bias;
    product.bf16_out = a.bf16_out;
    product.fp32_out = a.fp32_out;
    product_.Run(product);
    return;
  }
  sums_.resize(static_cast<size_t>(a.m * n));
  product.fp32_out = sums_.data();
  product_.Run(product);
  pool_.ParallelFor(a.m, 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      Bf16* out = a.bf16_out + r * n;
      if (out != a.residual + r * n) std::copy_n(a.residual + r * n, n, out);
      rows_.add_residual(out, sums_.data() + r * n, a.bias, n);
    }
  });
}

void TrainingProducts::InputGradient(const InputGradientArgs& a) {
  const int64_t whole[] = {0, a.weight.n()};
  const PaddedSegments k(whole);
  PackRows(RowsOf(a.weight), a.weight.columns, k);
  SegmentedProduct product = ProductOf(a.weight.columns, k);
  SetRows(a.dy, a.lddy, a.m, k, &product);
  product.bf16_out = a.dx;
  product_.Run(product);
}

void TrainingProducts::WeightGradient(const WeightGradientArgs& a) {
  const PaddedSegments k(a.packs);
  std::vector<const Bf16*> x_rows;
  for (int64_t r = 0; r < a.packs.back(); ++r) x_rows.push_back(a.x + r * a.ldx);
  PackRows(x_rows, a.columns, k);
  int64_t column = 0;  // of dy
  for (int part = 0; part < a.parts; ++part) {
    for (int64_t row = 0; row < a.part_rows[part]; row += kTransposedColumns) {
      const int64_t count = std::min(kTransposedColumns, a.part_rows[part] - row);
      TransposeRows(a.dy, a.lddy, column + row, count, k);
      SegmentedProduct product = ProductOf(a.columns, k);
      product.x = x_.data();
      product.ldx = k.padded_k();
      product.m = count;
      product.sum = SegmentSum::kTree;
      product.fp32_out = a.dw[part] + row * a.columns;
      product.start = a.continues ? product.fp32_out : nullptr;
      product_.Run(product);
    }
    column += a.part_rows[part];
  }
}

void TrainingProducts::PackColumns(const std::vector<const Bf16*>& columns,
                                   const PaddedSegments& k) {
  const auto n = static_cast<int64_t>(columns.size());
  ResizePanels(n, k);
  const std::vector<Bf16> zeros(static_cast<size_t>(k.padded_k()));
  pool_.ParallelFor(num_panels_, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t p = begin; p < end; ++p) {
      for (int64_t i = 0; i < k.count(); ++i) {
        const Bf16* segment[kPanelColumns];
        for (int64_t j = 0; j < kPanelColumns; ++j) {
          const int64_t column = p * kPanelColumns + j;
          segment[j] = column < n
                           ? columns[static_cast<size_t>(column)] + k.from[static_cast<size_t>(i)]
                           : zeros.data();
        }
        rows_.transpose_keys(segment, k.length(i), RoundUp(k.length(i), contract::kMmaK),
                             PanelSegment(p, i, k));
        ScanSegment(p, i, k);
      }
    }
  });
}

void TrainingProducts::PackRows(const std::vector<const Bf16*>& rows, int64_t n,
                                const PaddedSegments& k) {
  ResizePanels(n, k);
  pool_.ParallelFor(num_panels_, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t columns = std::min(kPanelColumns, n - p * kPanelColumns);
      for (int64_t i = 0; i < k.count(); ++i) {
        Bf16* out = PanelSegment(p, i, k);
        const Bf16* const* segment = rows.data() + k.from[static_cast<size_t>(i)];
        for (int64_t r = 0; r < k.length(i); ++r, out += kPanelColumns) {
          std::copy_n(segment[r] + p * kPanelColumns, columns, out);
          std::fill(out + columns, out + kPanelColumns, Bf16{0});
        }
        std::fill(out, PanelSegment(p, i + 1, k), Bf16{0});
        ScanSegment(p, i, k);
      }
    }
  });
}

void TrainingProducts::ResizePanels(int64_t n, const PaddedSegments& k) {
  num_panels_ = CeilDiv(n, kPanelColumns);
  panels_.resize(static_cast<size_t>(num_panels_ * k.padded_k() * kPanelColumns));
  ranges_.resize(static_cast<size_t>(num_panels_ * k.count()));
}

Bf16* TrainingProducts::PanelSegment(int64_t panel, int64_t segment, const PaddedSegments& k) {
  return panels_.data() +
         (panel * k.padded_k() + k.bounds[static_cast<size_t>(segment)]) * kPanelColumns;
}

void TrainingProducts::ScanSegment(int64_t panel, int64_t segment, const PaddedSegments& k) {
  const Bf16* begin = PanelSegment(panel, segment, k);
  ranges_[static_cast<size_t>(segment * num_panels_ + panel)] =
      rows_.scan_exponents(begin, PanelSegment(panel, segment + 1, k) - begin);
}

SegmentedProduct TrainingProducts::ProductOf(int64_t n, const PaddedSegments& k) const {
  SegmentedProduct product;
  product.panels = panels_.data();
  product.n = n;
  product.padded_k = k.padded_k();
  product.bounds = k.bounds;
  product.ranges = ranges_.data();
  product.range_stride = num_panels_;
  product.ldy = n;
  return product;
}

void TrainingProducts::SetRows(const Bf16* x, int64_t ldx, int64_t m, const PaddedSegments& k,
                               SegmentedProduct* product) {
  product->x = x;
  product->ldx = ldx;
  product->m = m;
  if (std::equal(k.bounds.begin(), k.bounds.end(), k.from.begin())) return;
  x_.resize(static_cast<size_t>(m * k.padded_k()));
  product->x = x_.data();
  product->ldx = k.padded_k();
  for (int64_t r = 0; r < m; ++r) {
    Bf16* row = x_.data() + r * k.padded_k();
    for (int64_t i = 0; i < k.count(); ++i) {
      Bf16* end = std::copy_n(x + r * ldx + k.from[static_cast<size_t>(i)], k.length(i),
                              row + k.bounds[static_cast<size_t>(i)]);
      std::fill(end, row + k.bounds[static_cast<size_t>(i) + 1], Bf16{0});
    }
  }
}

void TrainingProducts::TransposeRows(const Bf16* dy, int64_t lddy, int64_t first, int64_t count,
                                     const PaddedSegments& k) {
  x_.resize(static_cast<size_t>(count * k.padded_k()));
  const std::vector<Bf16> zeros(static_cast<size_t>(count));
  const int64_t padded_count = RoundUp(count, contract::kMmaK);
  // The 32 rows from column `at` of segment i.
  const auto transpose = [&](int64_t i, int64_t at, std::vector<Bf16>& block) {
    const Bf16* rows[kPanelColumns];
    for (int64_t j = 0; j < kPanelColumns; ++j) {
      rows[j] = at + j < k.length(i) ? dy + (k.from[static_cast<size_t>(i)] + at + j) * lddy + first
                                     : zeros.data();
    }
    block.resize(static_cast<size_t>(padded_count * kPanelColumns));
    rows_.transpose_keys(rows, count, padded_count, block.data());
    const int64_t column = k.bounds[static_cast<size_t>(i)] + at;
    const int64_t width = std::min(kPanelColumns, k.bounds[static_cast<size_t>(i) + 1] - column);
    for (int64_t c = 0; c < count; ++c) {
      std::copy_n(block.data() + c * kPanelColumns, width, x_.data() + c * k.padded_k() + column);
    }
  };
  for (int64_t i = 0; i < k.count(); ++i) {
    pool_.ParallelFor(CeilDiv(k.length(i), kPanelColumns), 1, [&](int64_t begin, int64_t end, int) {
      std::vector<Bf16> block;
      for (int64_t b = begin; b < end; ++b) transpose(i, b * kPanelColumns, block);
    });
  }
}

absl::Status Run(const StackedLinearArgs& a, Context& context) {
  context.products.StackedLinear(a);
  return absl::OkStatus();
}

absl::Status Run(const InputGradientArgs& a, Context& context) {
  context.products.InputGradient(a);
  return absl::OkStatus();
}

absl::Status Run(const WeightGradientArgs& a, Context& context) {
  context.products.WeightGradient(a);
  return absl::OkStatus();
}

}  // namespace isobit::cpu
