// mma_panel for AVX-512 (F, BW, DQ, VL).
//
// A register of weights holds 32 bf16 columns as 16 dwords of two each. Shifted left by 16 it is
// the even columns in fp32; masked it is the odd columns. The chain keeps even and odd columns
// apart, and stores them in their normal order.
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the undefined registers of its own AVX-512 header for uninitialised variables.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include "kernels/cpu/mma_panel_block.h"
#include "kernels/cpu/mma_panel_variants.h"

namespace isobit::cpu {
namespace {

__m512i Set32(uint32_t value) { return _mm512_set1_epi32(static_cast<int>(value)); }

template <int kRows>
bool FastBlock(const RowBlock& block, int64_t k, const uint16_t* w, int64_t k_stride, float* c,
               int64_t ldc) {
  const __m512i evens = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odds = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  const __m512 scale_in = _mm512_set1_ps(PowerOfTwo(-block.shift));
  __m512 chain[kRows][2];
  for (int r = 0; r < kRows; ++r) {
    const __m512 low = _mm512_loadu_ps(c + r * ldc);
    const __m512 high = _mm512_loadu_ps(c + r * ldc + 16);
    chain[r][0] = _mm512_mul_ps(_mm512_permutex2var_ps(low, evens, high), scale_in);
    chain[r][1] = _mm512_mul_ps(_mm512_permutex2var_ps(low, odds, high), scale_in);
  }
  __m512 peak = _mm512_setzero_ps();
  for (int64_t k0 = 0; k0 < k; k0 += kStepK) {
    // E of the products, as a field at bit 7 of each column. The bits below it are fraction bits
    // of weights: they cannot carry, so they do not disturb the order of exponents.
    __m512i top[kRows];
    for (int r = 0; r < kRows; ++r) top[r] = _mm512_set1_epi16(kMinEField << 7);
#pragma GCC unroll 4
    for (int i = 0; i < kStepK; ++i) {
      Prefetch(w + (k0 + i) * k_stride, k_stride);
      const __m512i magnitude =
          _mm512_and_si512(_mm512_loadu_si512(w + (k0 + i) * k_stride), _mm512_set1_epi16(0x7fff));
      for (int r = 0; r < kRows; ++r) {
        const __m512i e = Set32(block.exponent[r][k0 + i]);
        top[r] = _mm512_max_epu16(top[r], _mm512_add_epi16(magnitude, e));
      }
    }
    // E of all 17 terms, at bit 23; then 25 - E, to be added to the exponent field of each term. A
    // zero becomes 2^(25-E-127), which truncates to zero.
    __m512i raise[kRows][2];
    __m512i sum[kRows][2];
    for (int r = 0; r < kRows; ++r) {
      for (int h = 0; h < 2; ++h) {
        const __m512i term = _mm512_castps_si512(chain[r][h]);
        const __m512i chain_e =
            _mm512_add_epi32(_mm512_and_si512(term, Set32(0x7fffffff)), Set32(127u << 23));
        const __m512i products_e = h == 0 ? _mm512_slli_epi32(top[r], 16) : top[r];
        const __m512i e =
            _mm512_and_si512(_mm512_max_epu32(products_e, chain_e), Set32(0xff800000));
        raise[r][h] = _mm512_sub_epi32(Set32(static_cast<uint32_t>(kMaxEField) << 23), e);
        sum[r][h] = _mm512_cvttps_epi32(_mm512_castsi512_ps(_mm512_add_epi32(term, raise[r][h])));
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kStepK; ++i) {
      const __m512i pairs = _mm512_loadu_si512(w + (k0 + i) * k_stride);
      const __m512 columns[2] = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
                                 _mm512_castsi512_ps(_mm512_and_si512(pairs, Set32(0xffff0000)))};
      for (int r = 0; r < kRows; ++r) {
        const __m512 x = _mm512_set1_ps(block.x[r][k0 + i]);
        for (int h = 0; h < 2; ++h) {
          const __m512i product = _mm512_castps_si512(_mm512_mul_ps(columns[h], x));
          const __m512i term = _mm512_add_epi32(product, raise[r][h]);
          sum[r][h] = _mm512_add_epi32(sum[r][h], _mm512_cvttps_epi32(_mm512_castsi512_ps(term)));
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int h = 0; h < 2; ++h) {
        const __m512 rounded =
            _mm512_cvt_roundepi32_ps(sum[r][h], _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
        const __m512i unit = _mm512_sub_epi32(Set32(127u << 23), raise[r][h]);
        peak = _mm512_range_ps(peak, rounded, 0b1011);  // the larger magnitude
        chain[r][h] = _mm512_mul_ps(rounded, _mm512_castsi512_ps(unit));
      }
    }
  }
  if (_mm512_cmp_ps_mask(peak, _mm512_set1_ps(kPeakLimit), _CMP_GE_OQ) != 0) return false;
  const __m512i front = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i back =
      _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
  const __m512 scale_out = _mm512_set1_ps(PowerOfTwo(block.shift));
  for (int r = 0; r < kRows; ++r) {
    const __m512 even = _mm512_mul_ps(chain[r][0], scale_out);
    const __m512 odd = _mm512_mul_ps(chain[r][1], scale_out);
    _mm512_storeu_ps(c + r * ldc, _mm512_permutex2var_ps(even, front, odd));
    _mm512_storeu_ps(c + r * ldc + 16, _mm512_permutex2var_ps(even, back, odd));
  }
  return true;
}

}  // namespace

void MmaPanelsAvx512(const MmaArgs& args) {
  MmaPanels(args, [](const RowBlock& block, int64_t rows, int64_t k, const uint16_t* w,
                     int64_t k_stride, float* c, int64_t ldc) {
    switch (rows) {
      case 1:
        return FastBlock<1>(block, k, w, k_stride, c, ldc);
      case 2:
        return FastBlock<2>(block, k, w, k_stride, c, ldc);
      case 3:
        return FastBlock<3>(block, k, w, k_stride, c, ldc);
      default:
        return FastBlock<4>(block, k, w, k_stride, c, ldc);
    }
  });
}

}  // namespace isobit::cpu
