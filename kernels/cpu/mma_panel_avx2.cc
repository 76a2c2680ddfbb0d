// mma_panel for AVX2: the arithmetic of mma_panel_avx512.cc, 16 columns at a time. Some single
// instructions of AVX-512 take several here.
#include <immintrin.h>

#include "kernels/cpu/mma_panel_block.h"
#include "kernels/cpu/mma_panel_variants.h"

namespace isobit::cpu {
namespace {

__m256i Set32(uint32_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }

// Converts to fp32, truncating toward zero: exact as a double, then without the fraction bits that
// fp32 lacks.
__m128 TruncateToFloat(__m128i x) {
  const __m256d kept = _mm256_castsi256_pd(_mm256_set1_epi64x(-(int64_t{1} << 29)));
  return _mm256_cvtpd_ps(_mm256_and_pd(_mm256_cvtepi32_pd(x), kept));
}

// Columns 0..15 of c for kRows rows, 32 floats apart. Returns false if a sum may have left int32.
template <int kRows>
bool FastColumns(const RowBlock& block, int64_t k, const uint16_t* w, int64_t k_stride, float* c) {
  __m256 chain[kRows][2];  // even and odd columns
  for (int r = 0; r < kRows; ++r) {
    const __m256 low = _mm256_loadu_ps(c + r * kPanelColumns);
    const __m256 high = _mm256_loadu_ps(c + r * kPanelColumns + 8);
    for (int h = 0; h < 2; ++h) {
      const __m256 mixed =
          h == 0 ? _mm256_shuffle_ps(low, high, 0x88) : _mm256_shuffle_ps(low, high, 0xdd);
      chain[r][h] = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(mixed), 0xd8));
    }
  }
  __m256 peak = _mm256_setzero_ps();
  for (int64_t k0 = 0; k0 < k; k0 += kStepK) {
    __m256i top[kRows];
    for (int r = 0; r < kRows; ++r) top[r] = _mm256_set1_epi16(kMinEField << 7);
#pragma GCC unroll 4
    for (int i = 0; i < kStepK; ++i) {
      Prefetch(w + (k0 + i) * k_stride, k_stride);
      const __m256i pairs =
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + (k0 + i) * k_stride));
      const __m256i magnitude = _mm256_and_si256(pairs, _mm256_set1_epi16(0x7fff));
      for (int r = 0; r < kRows; ++r) {
        const __m256i e = Set32(block.exponent[r][k0 + i]);
        top[r] = _mm256_max_epu16(top[r], _mm256_add_epi16(magnitude, e));
      }
    }
    __m256i raise[kRows][2];
    __m256i sum[kRows][2];
    for (int r = 0; r < kRows; ++r) {
      for (int h = 0; h < 2; ++h) {
        const __m256i term = _mm256_castps_si256(chain[r][h]);
        const __m256i chain_e =
            _mm256_add_epi32(_mm256_and_si256(term, Set32(0x7fffffff)), Set32(127u << 23));
        const __m256i products_e = h == 0 ? _mm256_slli_epi32(top[r], 16) : top[r];
        const __m256i e =
            _mm256_and_si256(_mm256_max_epu32(products_e, chain_e), Set32(0xff800000));
        raise[r][h] = _mm256_sub_epi32(Set32(static_cast<uint32_t>(kMaxEField) << 23), e);
        sum[r][h] = _mm256_cvttps_epi32(_mm256_castsi256_ps(_mm256_add_epi32(term, raise[r][h])));
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kStepK; ++i) {
      const __m256i pairs =
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + (k0 + i) * k_stride));
      const __m256 columns[2] = {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
                                 _mm256_castsi256_ps(_mm256_and_si256(pairs, Set32(0xffff0000)))};
      for (int r = 0; r < kRows; ++r) {
        const __m256 x = _mm256_set1_ps(block.x[r][k0 + i]);
        for (int h = 0; h < 2; ++h) {
          const __m256i product = _mm256_castps_si256(_mm256_mul_ps(columns[h], x));
          const __m256i term = _mm256_add_epi32(product, raise[r][h]);
          sum[r][h] = _mm256_add_epi32(sum[r][h], _mm256_cvttps_epi32(_mm256_castsi256_ps(term)));
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int h = 0; h < 2; ++h) {
        const __m256 rounded =
            _mm256_set_m128(TruncateToFloat(_mm256_extracti128_si256(sum[r][h], 1)),
                            TruncateToFloat(_mm256_castsi256_si128(sum[r][h])));
        const __m256 magnitude = _mm256_and_ps(rounded, _mm256_castsi256_ps(Set32(0x7fffffff)));
        const __m256i unit = _mm256_sub_epi32(Set32(127u << 23), raise[r][h]);
        peak = _mm256_max_ps(peak, magnitude);
        chain[r][h] = _mm256_mul_ps(rounded, _mm256_castsi256_ps(unit));
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    const __m256 low = _mm256_unpacklo_ps(chain[r][0], chain[r][1]);
    const __m256 high = _mm256_unpackhi_ps(chain[r][0], chain[r][1]);
    _mm256_storeu_ps(c + r * kPanelColumns, _mm256_permute2f128_ps(low, high, 0x20));
    _mm256_storeu_ps(c + r * kPanelColumns + 8, _mm256_permute2f128_ps(low, high, 0x31));
  }
  return _mm256_movemask_ps(_mm256_cmp_ps(peak, _mm256_set1_ps(kPeakLimit), _CMP_GE_OQ)) == 0;
}

template <int kRows>
bool FastBlock(const RowBlock& block, int64_t k, const uint16_t* w, int64_t k_stride, float* c,
               int64_t ldc) {
  float scaled[kRows * kPanelColumns];
  const float scale_in = PowerOfTwo(-block.shift);
  const float scale_out = PowerOfTwo(block.shift);
  for (int r = 0; r < kRows; ++r) {
    for (int64_t j = 0; j < kPanelColumns; ++j) {
      scaled[r * kPanelColumns + j] = c[r * ldc + j] * scale_in;
    }
  }
  if (!FastColumns<kRows>(block, k, w, k_stride, scaled) ||
      !FastColumns<kRows>(block, k, w + 16, k_stride, scaled + 16)) {
    return false;
  }
  for (int r = 0; r < kRows; ++r) {
    for (int64_t j = 0; j < kPanelColumns; ++j) {
      c[r * ldc + j] = scaled[r * kPanelColumns + j] * scale_out;
    }
  }
  return true;
}

}  // namespace

void MmaPanelsAvx2(const MmaArgs& args) {
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
