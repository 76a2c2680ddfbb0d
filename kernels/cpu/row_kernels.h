// The loops between the matrix products, compiled once per instruction set (row_kernels.inc) and
// called through a table. Each keeps the order of operations that kernels/contract defines.
#ifndef ISOBIT_KERNELS_CPU_ROW_KERNELS_H_
#define ISOBIT_KERNELS_CPU_ROW_KERNELS_H_

#include <cstdint>

#include "kernels/contract/attention.h"
#include "kernels/contract/gradients.h"
#include "kernels/contract/portable.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/mma_panel.h"

namespace isobit::cpu {

using contract::Bf16;

// How the sums of a dot product's segments are combined.
enum class SegmentSum {
  kChain,      // contract::ChainOf
  kTree,       // contract::TreeOf
  kZeroChain,  // a chain that starts from +0: the splits of mode kVanilla
};

// The inputs of one token's noise (C8).
struct NoiseKey {
  uint64_t seed;
  uint32_t sample;
  uint32_t position;
};

// A token in the filters' order: by logit, ties by lowest id.
struct RankedToken {
  float logit;
  int32_t id;
};

inline constexpr int64_t kVocabBlock = 64;  // logits per entry of block_max

// Arrays may not overlap unless they are the same argument. n counts elements and may be any
// number, unless a comment says otherwise.
struct RowKernels {
  // Combines segments 0..count-1, each n values at sums + segment * stride, into segment 0, and
  // adds the bias (or null).
  void (*join_segments)(SegmentSum kind, float* sums, int64_t stride, int count, const float* bias,
                        int64_t n);
  void (*to_bf16)(const float* x, Bf16* out, int64_t n);
  // out = HopSum over two or more partials, in the given order. out is not one of them.
  void (*hop_sum)(const float* const* partials, int count, float* out, int64_t n);
  // out = TreeOf over 1, 2, 4 or 8 partials. out may be one of them.
  void (*tree_sum)(const float* const* partials, int count, float* out, int64_t n);

  void (*add_residual)(Bf16* residual, const float* sum, const float* bias, int64_t n);
  float (*sum_of_squares)(const Bf16* x, int64_t n);  // n > 0
  // out may be x.
  void (*normalise)(const Bf16* x, float inverse_rms, const Bf16* weight, Bf16* out, int64_t n);
  void (*swiglu)(const Bf16* gate, const Bf16* up, Bf16* out, int64_t n);
  void (*rotate)(Bf16* first, Bf16* second, const float* cosine, const float* sine, int64_t n);

  // out[k][32] = row[j][k], k < d and j < 32; out is +0 for d <= k < padded_d (a multiple of 16).
  void (*transpose_keys)(const Bf16* const* rows, int64_t d, int64_t padded_d, Bf16* out);
  ExponentRange (*scan_exponents)(const Bf16* x, int64_t n);
  // contract::UpdateSoftmax on one row's tile of scores, of which the row sees [begin, end), within
  // [0, tile). Writes the weights as bf16 to p[0, p_end); returns alpha. tile and p_end >= end are
  // multiples of 16.
  float (*update_softmax)(contract::SoftmaxRow* row, float* scores, int begin, int end, int tile,
                          float scale, Bf16* p, int p_end);
  void (*scale)(float* x, float factor, int64_t n);
  // total = FoldAccumulator(total, acc)
  void (*fold)(float* total, const float* acc, contract::FoldFactors factors, int64_t n);
  void (*scale_to_bf16)(const float* x, float factor, Bf16* out, int64_t n);

  bool (*all_finite)(const float* x, int64_t n);
  // z *= factor; returns false if a result is NaN or +inf.
  bool (*scale_logits)(float* z, float factor, int64_t n);
  // maxima[i] = the largest of z's i-th block of kVocabBlock (the last one may be short).
  void (*block_max)(const float* z, int64_t n, float* maxima);
  float (*max)(const float* z, int64_t n);  // -inf for none
  // Sums of TokenWeight and (unless null) TokenWeightedDistance against `max`.
  void (*sum_weights)(const float* z, float max, int64_t n, int64_t* weights, int64_t* distances);
  // The largest logit that does not pass min-p; -inf if all pass.
  float (*largest_below_min_p)(const float* z, float max, float min_p, int64_t n);
  // Sets every token after `last` in the filters' order to -inf. An id of -1 comes before all ids
  // with an equal logit.
  void (*keep_prefix)(float* z, RankedToken last, int64_t n);
  // values[i] = z[i] + TokenGumbel(first_id + i) for one block of kVocabBlock tokens; first_id is a
  // multiple of 4.
  void (*add_gumbel)(const float* z, NoiseKey key, uint32_t first_id, float* values);

  // ---- Gradients (C11 to C15). n > 0.

  // The tree of C12 over a[i] * b[i], and that of C15 over x[i] * x[i].
  float (*dot_tree)(const Bf16* a, const Bf16* b, int64_t n);
  double (*square_tree)(const float* x, int64_t n);
  void (*norm_gradient)(const Bf16* x, const Bf16* weight, const Bf16* dy, float inverse_rms,
                        int64_t n, Bf16* dx);
  // sums += NormWeightTerm(dy, x, inverse_rms)
  void (*add_norm_terms)(const Bf16* dy, const Bf16* x, float inverse_rms, int64_t n, float* sums);
  // sums += x
  void (*add_row)(const Bf16* x, int64_t n, float* sums);
  // RotateGradient in place.
  void (*rotate_back)(Bf16* first, Bf16* second, const float* cosine, const float* sine, int64_t n);
  void (*swiglu_gradient)(const Bf16* gate, const Bf16* up, const Bf16* ds, Bf16* dgate, Bf16* dup,
                          int64_t n);
  // For one key and n rows, of which [begin, end) see it: bf16(p) and ds; +0 for the other rows.
  void (*score_gradients)(const float* scores, const float* value_dots, const float* log_sums,
                          const float* output_dots, float scale, int begin, int end, int n, Bf16* p,
                          Bf16* ds);
  // LogitGradient for all tokens as if none were the target; +0 for tokens after `last` in the
  // filters' order.
  void (*logit_gradients)(const float* z, const contract::RowDistribution& row, RankedToken last,
                          float dlogprob, float dentropy, float inverse_temperature, int64_t n,
                          Bf16* out);
  // StepAdamW; working = bf16(parameter), unless null.
  void (*adamw)(const contract::AdamWStep& step, const float* gradient, int64_t n, float* parameter,
                float* m, float* v, Bf16* working);
};

// The kernels for an instruction set, which must not exceed DetectIsa().
const RowKernels& GetRowKernels(Isa isa);

}  // namespace isobit::cpu

#endif  // ISOBIT_KERNELS_CPU_ROW_KERNELS_H_
