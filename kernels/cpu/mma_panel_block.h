// Shared by the variants of mma_panel: how a product is divided into blocks, which tier a block
// uses, and the wide and scalar tiers.
//
// Each variant's translation unit is compiled for its own instruction set. So everything here has
// internal linkage and calls nothing that could be emitted as a shared inline function: the linker
// would keep only one copy, perhaps one that an older processor cannot run.
#ifndef ISOBIT_KERNELS_CPU_MMA_PANEL_BLOCK_H_
#define ISOBIT_KERNELS_CPU_MMA_PANEL_BLOCK_H_

#include <cstdint>

#include "kernels/contract/constants.h"
#include "kernels/cpu/mma_panel.h"
#include "kernels/cpu/mma_panel_variants.h"

namespace isobit::cpu {
namespace {

constexpr int64_t kStepK = contract::kMmaK;
constexpr int64_t kBlockK = 256;  // 16 KiB of a panel, which stay in L1 for all rows
constexpr int64_t kBlockRows = 4;

// The fast tier's window. The rows of a block, and with them the chain value, are scaled by
// 2^-shift, so that |x| < 2^5; a power of two commutes with every truncation. Let E be the
// contract's largest exponent after scaling. In the window
//   - |w| < 2^11, so products are below 2^16, and 256 of them add less than 2^24 to a chain value
//     that starts below 2^24: E <= 25, so 2^(25-E) is a non-negative shift of exponents;
//   - every product and chain value is a multiple of 2^-126; with the bounds above, every factor
//     of a product that is not zero is then normal. So no fp32 operation is subnormal or inexact,
//     and an E below -101 may be replaced by -101, since nothing is truncated in either case.
//     That also prevents a zero, whose exponent
//     reads -127 here, from raising E.
constexpr int kBias = 2 * 127;  // of E and of all sums of two exponent fields
constexpr int kMaxXField = 127 + 4;
constexpr int kMaxWField = 127 + 10;
constexpr int kMinProductFields = kBias - 126 + 14;  // a product's last bit is 2^(e-14)
constexpr int kMinEField = kBias - 126 + contract::kMmaFractionBits;
constexpr int kLeastEField = kBias + contract::kMmaMinExponent;
constexpr int kMaxEField = kBias + contract::kMmaFractionBits;
constexpr int kMaxShift = 100;  // keeps the scaled-back chain value finite
constexpr int kMinChainField = 127 - 126 + 23;
constexpr int kEndChainField = 127 + 24;

// The largest sum of 17 terms, in units of 2^(E-25), exceeds int32 by so little that it wraps to at
// least this magnitude. An ordinary sum is seldom that large.
constexpr float kPeakLimit = 0x1p32f - (16 * 255 * 255 * 0x1p11f + 0x1p26f);
static_assert(kPeakLimit == 4294967296.0 - (16 * 65025 * 2048.0 + 67108864.0));

// Rows of x as the fast tier reads them.
struct RowBlock {
  alignas(64) float x[kBlockRows][kBlockK];            // scaled by 2^-shift
  alignas(64) uint32_t exponent[kBlockRows][kBlockK];  // its field at bit 7 of both 16-bit halves
  int shift;
  int min_field;  // over the scaled non-zero values
  bool finite;
  bool in_window;
};

inline __attribute__((always_inline)) float FloatFromBits(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}

inline __attribute__((always_inline)) uint32_t FloatBits(float x) {
  return __builtin_bit_cast(uint32_t, x);
}

inline __attribute__((always_inline)) float PowerOfTwo(int exponent) {
  return FloatFromBits(static_cast<uint32_t>(exponent + 127) << 23);
}

// Prefetches the same row of the panel's next block. A hardware prefetcher cannot predict it,
// because the blocks of other panels come first. Weights in memory then stream two to three times
// faster.
inline __attribute__((always_inline)) void Prefetch(const uint16_t* row, int64_t k_stride) {
  __builtin_prefetch(row + kBlockK * k_stride);
}

void LoadRows(const uint16_t* x, int64_t ldx, int64_t rows, int64_t k, RowBlock* block) {
  uint16_t top = 0;
  uint16_t least = 0xffff;  // of magnitude - 1; a zero wraps round to the maximum
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < k; ++i) {
      const uint16_t magnitude = x[r * ldx + i] & 0x7fff;
      const uint16_t less_one = static_cast<uint16_t>(magnitude - 1);
      top = magnitude > top ? magnitude : top;
      least = less_one < least ? less_one : least;
    }
  }
  const int max_field = top >> 7;
  const int min_field = least == 0xffff ? 255 : (least + 1) >> 7;
  block->finite = max_field < 255;
  block->shift = max_field > kMaxXField ? max_field - kMaxXField : 0;
  block->min_field = (min_field > 1 ? min_field : 1) - block->shift;
  block->in_window = block->finite && block->shift <= kMaxShift;
  if (!block->in_window) return;
  const int shift = block->shift;
  const float scale = PowerOfTwo(-shift);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < k; ++i) {
      const uint32_t bits = x[r * ldx + i];
      const int field = static_cast<int>((bits >> 7) & 0xff) - shift;
      const uint32_t e = field > 0 ? static_cast<uint32_t>(field) : 0;
      block->x[r][i] = FloatFromBits(bits << 16) * scale;
      block->exponent[r][i] = (e << 7) | (e << 23);
    }
  }
}

// Whether the rows and one panel's weights and chain values are all in the window.
bool InWindow(const RowBlock& block, const ExponentRange& w, const float* c, int64_t ldc,
              int64_t rows) {
  if (!block.in_window || w.max > kMaxWField) return false;
  if (block.min_field + w.min_nonzero < kMinProductFields) return false;
  const uint32_t low = static_cast<uint32_t>(kMinChainField + block.shift) << 23;
  const uint32_t span = static_cast<uint32_t>(kEndChainField - kMinChainField) << 23;
  uint32_t outside = 0;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < kPanelColumns; ++j) {
      const uint32_t magnitude = FloatBits(c[r * ldc + j]) & 0x7fffffff;
      outside |= (magnitude != 0) & (magnitude - low >= span);
    }
  }
  return outside == 0;
}

// One row, one panel, one step. In double precision every finite operand and product is exact, and
// so is a sum of terms that are integers below 2^32.
void WideStep(const uint16_t* x, const uint16_t* w, int64_t k_stride, float* c, int64_t* scalar) {
  int16_t top[kPanelColumns];  // E; a zero term has no exponent
  for (int64_t j = 0; j < kPanelColumns; ++j) {
    const uint32_t magnitude = FloatBits(c[j]) & 0x7fffffff;
    const int field = static_cast<int>(magnitude >> 23);
    const int e = magnitude == 0 ? 0 : (field > 1 ? field : 1) + 127;
    top[j] = static_cast<int16_t>(e > kLeastEField ? e : kLeastEField);
  }
  for (int64_t i = 0; i < kStepK; ++i) {
    const int x_magnitude = x[i] & 0x7fff;
    if (x_magnitude == 0) continue;
    const int16_t x_field = static_cast<int16_t>(x_magnitude >> 7 > 1 ? x_magnitude >> 7 : 1);
    for (int64_t j = 0; j < kPanelColumns; ++j) {
      const int16_t magnitude = static_cast<int16_t>(w[i * k_stride + j] & 0x7fff);
      const int16_t field = static_cast<int16_t>(magnitude >> 7);
      const int16_t sum = static_cast<int16_t>((field > 1 ? field : 1) + x_field);
      const int16_t e = magnitude != 0 ? sum : int16_t{0};
      top[j] = e > top[j] ? e : top[j];
    }
  }
  double scale[kPanelColumns];      // 2^(25-E)
  double unit[kPanelColumns];       // 2^(E-25)
  int32_t products[kPanelColumns];  // 16 terms below 2^27 * 0.993 each
  for (int64_t j = 0; j < kPanelColumns; ++j) {
    const int64_t exponent = kMaxEField - static_cast<int64_t>(top[j]);
    scale[j] = __builtin_bit_cast(double, (1023 + exponent) << 52);
    unit[j] = __builtin_bit_cast(double, (1023 - exponent) << 52);
    products[j] = 0;
  }
  for (int64_t i = 0; i < kStepK; ++i) {
    const double x_value = FloatFromBits(static_cast<uint32_t>(x[i]) << 16);
    for (int64_t j = 0; j < kPanelColumns; ++j) {
      const double w_value = FloatFromBits(static_cast<uint32_t>(w[i * k_stride + j]) << 16);
      products[j] += static_cast<int32_t>(w_value * x_value * scale[j]);
    }
  }
  uint32_t settled[kPanelColumns];
  float out[kPanelColumns];
  for (int64_t j = 0; j < kPanelColumns; ++j) {
    const bool finite = (FloatBits(c[j]) & 0x7f800000) != 0x7f800000;
    const double chain = finite ? c[j] : 0.0f;
    const double sum = static_cast<double>(products[j]) + static_cast<int32_t>(chain * scale[j]);
    // Clearing the fraction bits that fp32 does not have truncates toward zero.
    const double result = __builtin_bit_cast(
        double, __builtin_bit_cast(uint64_t, sum * unit[j]) & ~((uint64_t{1} << 29) - 1));
    const double magnitude = __builtin_fabs(result);
    settled[j] = finite & ((magnitude == 0) | ((magnitude >= 0x1p-126) & (magnitude < 0x1p128)));
    out[j] = static_cast<float>(settled[j] ? result : 0.0);
  }
  for (int64_t j = 0; j < kPanelColumns; ++j) {
    if (settled[j]) {
      c[j] = out[j];
    } else {
      c[j] = ScalarMmaStep(c[j], x, w + j, k_stride);
      ++*scalar;
    }
  }
}

// A block of rows and one panel, outside the window.
void ExactBlock(const uint16_t* x, int64_t ldx, int64_t rows, int64_t k, bool finite,
                const uint16_t* w, int64_t k_stride, float* c, int64_t ldc, TierCounts* tiers) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < k; i += kStepK) {
      const uint16_t* x_step = x + r * ldx + i;
      const uint16_t* w_step = w + i * k_stride;
      float* chain = c + r * ldc;
      if (finite) {
        WideStep(x_step, w_step, k_stride, chain, &tiers->scalar);
        ++tiers->wide;
      } else {
        for (int64_t j = 0; j < kPanelColumns; ++j) {
          chain[j] = ScalarMmaStep(chain[j], x_step, w_step + j, k_stride);
        }
        tiers->scalar += kPanelColumns;
      }
    }
  }
}

// The whole product. fast(block, rows, k, w, k_stride, c, ldc) computes a block in the window, or
// returns false and leaves c unchanged.
template <typename Fast>
inline __attribute__((always_inline)) void MmaPanels(const MmaArgs& args, Fast fast) {
  RowBlock block;
  TierCounts tiers;
  for (int64_t k0 = 0; k0 < args.k; k0 += kBlockK) {
    const int64_t k = args.k - k0 < kBlockK ? args.k - k0 : kBlockK;
    for (int64_t r0 = 0; r0 < args.rows; r0 += kBlockRows) {
      const int64_t rows = args.rows - r0 < kBlockRows ? args.rows - r0 : kBlockRows;
      const uint16_t* x = args.x + r0 * args.ldx + k0;
      LoadRows(x, args.ldx, rows, k, &block);
      for (int64_t p = 0; p < args.panels; ++p) {
        const ExponentRange& range = args.w.ranges[p];
        const uint16_t* w = args.w.data + p * args.w.panel_stride + k0 * args.w.k_stride;
        float* c = args.c + r0 * args.ldc + p * kPanelColumns;
        if (InWindow(block, range, c, args.ldc, rows) &&
            fast(block, rows, k, w, args.w.k_stride, c, args.ldc)) {
          tiers.fast += rows * (k / kStepK);
        } else {
          ExactBlock(x, args.ldx, rows, k, block.finite && range.max < 255, w, args.w.k_stride, c,
                     args.ldc, &tiers);
        }
      }
    }
  }
  if (args.tiers != nullptr) {
    args.tiers->fast += tiers.fast;
    args.tiers->wide += tiers.wide;
    args.tiers->scalar += tiers.scalar;
  }
}

}  // namespace
}  // namespace isobit::cpu

#endif  // ISOBIT_KERNELS_CPU_MMA_PANEL_BLOCK_H_
