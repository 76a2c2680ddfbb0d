// Attention over whole sequences, and its gradient, one query head and row at a time (C6, C13).
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "kernels/contract/attention.h"
#include "kernels/contract/mma16.h"
#include "kernels/contract/row_functions.h"
#include "kernels/oracle/attention.h"
#include "kernels/oracle/kernels.h"

namespace isobit::oracle {
namespace {

// Sets the rows [rows, width] of no sequence to +0.
void ClearOutside(const PassSequences& sequences, int64_t rows, int64_t width, Bf16* out) {
  const bool none = sequences.bounds.empty();
  std::fill_n(out, (none ? rows : sequences.bounds.front()) * width, Bf16{0});
  if (!none) std::fill(out + sequences.bounds.back() * width, out + rows * width, Bf16{0});
}

// One query head and one sequence, of n rows. The vectors are [n][n], row i and key j at i * n + j;
// +0 for keys that the row does not see.
struct HeadWeights {
  std::vector<Bf16> p;   // bf16(p_ij)
  std::vector<Bf16> ds;  // ds_ij
};

// The gradient of one sequence.
class SequenceGradient {
 public:
  SequenceGradient(const AttentionGradientArgs& a, int64_t first_row, int64_t n)
      : a_(a),
        f_(a.forward),
        first_row_(first_row),
        n_(n),
        d_(f_.head_dim),
        r_(contract::GradientScale(f_.head_dim)) {}

  void Run() {
    const int32_t group = f_.heads / f_.kv_heads;
    for (int32_t kv_head = 0; kv_head < f_.kv_heads; ++kv_head) {
      std::vector<float> dk(static_cast<size_t>(n_ * d_));
      std::vector<float> dv(static_cast<size_t>(n_ * d_));
      for (int32_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
        const HeadWeights w = Weights(h, kv_head);
        KeyGradients(w.p, Head(a_.dout, f_.heads, h), dv);
        KeyGradients(w.ds, Head(f_.q, f_.heads, h), dk);
        QueryGradients(w.ds, h, kv_head);
      }
      for (int64_t j = 0; j < n_; ++j) {
        const int64_t at = ((first_row_ + j) * f_.kv_heads + kv_head) * d_;
        for (int64_t e = 0; e < d_; ++e) {
          const auto i = static_cast<size_t>(j * d_ + e);
          a_.dk[at + e] = contract::FloatToBf16(contract::Mul(dk[i], r_));
          a_.dv[at + e] = contract::FloatToBf16(dv[i]);
        }
      }
    }
  }

 private:
  // A head of a tensor [rows, heads * head_dim] in this sequence, transposed: [head_dim][n].
  std::vector<Bf16> Head(const Bf16* x, int32_t heads, int32_t head) const {
    std::vector<Bf16> out(static_cast<size_t>(n_ * d_));
    for (int64_t i = 0; i < n_; ++i) {
      for (int64_t e = 0; e < d_; ++e) {
        out[static_cast<size_t>(e * n_ + i)] = x[((first_row_ + i) * heads + head) * d_ + e];
      }
    }
    return out;
  }

  HeadWeights Weights(int32_t h, int32_t kv_head) const {
    const auto size = static_cast<size_t>(n_ * n_);
    HeadWeights w = {std::vector<Bf16>(size), std::vector<Bf16>(size)};
    for (int64_t i = 0; i < n_; ++i) {
      const int64_t query = ((first_row_ + i) * f_.heads + h) * d_;
      const float log_sum = f_.log_sums[h * f_.rows + first_row_ + i];
      const float output_dot = OutputDot(a_.dout + query, f_.out + query);
      for (int64_t j = 0; j <= i; ++j) {
        if (!contract::Sees(i, j, f_.window)) continue;
        const int64_t key = ((first_row_ + j) * f_.kv_heads + kv_head) * d_;
        const float score = contract::DotChain(0.0f, f_.q + query, f_.k + key, d_);
        const float p = contract::AttentionWeight(score, f_.scale, log_sum);
        const float value_dot = contract::DotChain(0.0f, a_.dout + query, f_.v + key, d_);
        w.p[static_cast<size_t>(i * n_ + j)] = contract::FloatToBf16(p);
        w.ds[static_cast<size_t>(i * n_ + j)] = contract::ScoreGradient(p, value_dot, output_dot);
      }
    }
    return w;
  }

  // D_i
  float OutputDot(const Bf16* dout, const Bf16* out) const {
    contract::TreeSum tree;
    for (int64_t e = 0; e < d_; e += contract::kNormLeaf) {
      float a[contract::kNormLeaf] = {};
      float b[contract::kNormLeaf] = {};
      for (int64_t c = 0; c < contract::kNormLeaf && e + c < d_; ++c) {
        a[c] = contract::Bf16ToFloat(dout[e + c]);
        b[c] = contract::Bf16ToFloat(out[e + c]);
      }
      tree.Push(contract::DotLeaf(a, b));
    }
    return tree.Total();
  }

  // Continues the chains of all keys, [n][head_dim], over the rows of one query head: weights
  // [n][n], rows x [head_dim][n].
  void KeyGradients(const std::vector<Bf16>& weights, const std::vector<Bf16>& x,
                    std::vector<float>& chains) const {
    std::vector<Bf16> column(static_cast<size_t>(n_));
    for (int64_t j = 0; j < n_; ++j) {
      for (int64_t i = 0; i < n_; ++i) {
        column[static_cast<size_t>(i)] = weights[static_cast<size_t>(i * n_ + j)];
      }
      const int64_t begin = j / contract::kMmaK * contract::kMmaK;  // no row before sees the key
      for (int64_t e = 0; e < d_; ++e) {
        float& c = chains[static_cast<size_t>(j * d_ + e)];
        c = contract::DotChain(c, column.data() + begin, x.data() + e * n_ + begin, n_ - begin);
      }
    }
  }

  void QueryGradients(const std::vector<Bf16>& ds, int32_t h, int32_t kv_head) const {
    const std::vector<Bf16> k = Head(f_.k, f_.kv_heads, kv_head);
    for (int64_t i = 0; i < n_; ++i) {
      for (int64_t e = 0; e < d_; ++e) {
        float c = 0.0f;
        for (int64_t j = i / contract::kMmaK * contract::kMmaK; j >= 0; j -= contract::kMmaK) {
          c = contract::DotChain(c, ds.data() + i * n_ + j, k.data() + e * n_ + j,
                                 std::min<int64_t>(contract::kMmaK, n_ - j));
        }
        a_.dq[((first_row_ + i) * f_.heads + h) * d_ + e] =
            contract::FloatToBf16(contract::Mul(c, r_));
      }
    }
  }

  const AttentionGradientArgs& a_;
  const TrainingAttentionArgs& f_;
  const int64_t first_row_;
  const int64_t n_;
  const int64_t d_;
  const float r_;
};

}  // namespace

// k and v are a cache with pages of one position, whose numbers are the rows.
absl::Status Run(const TrainingAttentionArgs& a, Context& /*context*/) {
  const int64_t width = int64_t{a.heads} * a.head_dim;
  ClearOutside(a.sequences, a.rows, width, a.out);
  std::vector<int32_t> pages(static_cast<size_t>(a.rows));
  std::iota(pages.begin(), pages.end(), 0);
  std::vector<SequenceRows> sequences;
  for (size_t i = 0; i + 1 < a.sequences.bounds.size(); ++i) {
    const int64_t begin = a.sequences.bounds[i];
    sequences.push_back({.first_row = begin,
                         .num_rows = a.sequences.bounds[i + 1] - begin,
                         .first_position = 0,
                         .pages = pages.data() + begin});
  }
  Attend({.q = a.q,
          .ldq = width,
          .heads = a.heads,
          .sequences = {.host = sequences},
          .kv = {const_cast<Bf16*>(a.k), const_cast<Bf16*>(a.v), 1, a.kv_heads, a.head_dim},
          .scale = a.scale,
          .window = a.window,
          .out = a.out,
          .ldo = width},
         a.log_sums, a.rows);
  return absl::OkStatus();
}

absl::Status Run(const AttentionGradientArgs& a, Context& /*context*/) {
  const TrainingAttentionArgs& f = a.forward;
  ClearOutside(f.sequences, f.rows, int64_t{f.heads} * f.head_dim, a.dq);
  ClearOutside(f.sequences, f.rows, int64_t{f.kv_heads} * f.head_dim, a.dk);
  ClearOutside(f.sequences, f.rows, int64_t{f.kv_heads} * f.head_dim, a.dv);
  for (size_t i = 0; i + 1 < f.sequences.bounds.size(); ++i) {
    const int64_t begin = f.sequences.bounds[i];
    SequenceGradient(a, begin, f.sequences.bounds[i + 1] - begin).Run();
  }
  return absl::OkStatus();
}

}  // namespace isobit::oracle
