// The row functions of training and their gradients (C5, C12).
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/base/status_macros.h"
#include "kernels/contract/row_functions.h"
#include "kernels/oracle/kernels.h"
#include "kernels/oracle/pack_sums.h"

namespace isobit::oracle {
namespace {

// dx of one row x [n] of RMSNorm, whose inverse root is given.
void NormGradientRow(const Bf16* x, const Bf16* weight, const Bf16* dy, int64_t n, float inverse,
                     Bf16* dx) {
  std::vector<float> h(static_cast<size_t>(n + contract::kNormLeaf));
  std::vector<float> g(h.size());
  for (int64_t c = 0; c < n; ++c) {
    h[static_cast<size_t>(c)] = contract::Mul(contract::Bf16ToFloat(x[c]), inverse);
    g[static_cast<size_t>(c)] =
        contract::Mul(contract::Bf16ToFloat(dy[c]), contract::Bf16ToFloat(weight[c]));
  }
  contract::TreeSum tree;
  for (int64_t c = 0; c < n; c += contract::kNormLeaf) {
    float a[contract::kNormLeaf];
    float b[contract::kNormLeaf];
    std::copy_n(g.data() + c, contract::kNormLeaf, a);
    std::copy_n(h.data() + c, contract::kNormLeaf, b);
    tree.Push(contract::DotLeaf(a, b));
  }
  const float mean = contract::Div(tree.Total(), static_cast<float>(n));
  for (int64_t c = 0; c < n; ++c) {
    const auto i = static_cast<size_t>(c);
    dx[c] = contract::NormGradient(h[i], g[i], mean, inverse);
  }
}

float InverseOf(const Bf16* x, int64_t n, float eps) {
  return contract::InverseRms(contract::SumOfSquares(x, n), n, eps);
}

// The gradient of one head [head_dim] before its rotation.
void RotateBack(const Bf16* dy, int32_t head_dim, const float* cosine, const float* sine,
                Bf16* dx) {
  const int32_t half = head_dim / 2;
  for (int32_t i = 0; i < half; ++i) {
    const contract::RotatedGradient d =
        contract::RotateGradient(dy[i], dy[half + i], cosine[i], sine[i]);
    dx[i] = d.first;
    dx[half + i] = d.second;
  }
}

// QkvGradient for the heads of q or of k: columns [first, first + heads * head_dim) of qkv.
void HeadsGradient(const QkvGradientArgs& a, int64_t first, int32_t heads, const Bf16* dy,
                   const Bf16* norm, float* dnorm) {
  const TrainingQkvArgs& f = a.forward;
  const int64_t d = f.head_dim;
  const int64_t ld = (f.heads + 2 * f.kv_heads) * d;
  std::vector<Bf16> unrotated(static_cast<size_t>(f.rows * heads * d));
  std::vector<float> inverse(static_cast<size_t>(f.rows * heads));
  for (int64_t i = 0; i < f.rows * heads; ++i) {
    const int64_t row = i / heads;
    const int64_t column = first + i % heads * d;
    const int64_t angle = f.positions[row] * (d / 2);
    Bf16* dhead = norm != nullptr ? unrotated.data() + i * d : a.dqkv + row * ld + column;
    RotateBack(dy + i * d, f.head_dim, f.cosine + angle, f.sine + angle, dhead);
    if (norm == nullptr) continue;
    const Bf16* head = f.qkv + row * ld + column;
    inverse[static_cast<size_t>(i)] = InverseOf(head, d, f.eps);
    NormGradientRow(head, norm, dhead, d, inverse[static_cast<size_t>(i)],
                    a.dqkv + row * ld + column);
  }
  if (norm == nullptr || dnorm == nullptr) return;
  for (int64_t c = 0; c < d; ++c) {
    dnorm[c] = SumOverPacks(a.packs, [&](int64_t begin, int64_t end) {
      float sum = 0.0f;
      for (int32_t h = 0; h < heads; ++h) {
        const float head_sum = ColumnSum(begin, end, [&](int64_t r) {
          const auto i = static_cast<size_t>(r * heads + h);
          return contract::NormWeightTerm(
              unrotated[i * static_cast<size_t>(d) + static_cast<size_t>(c)],
              f.qkv[r * ld + first + h * d + c], inverse[i]);
        });
        sum = contract::Add(sum, head_sum);
      }
      return sum;
    });
  }
}

}  // namespace

absl::Status Run(const RmsNormGradientArgs& a, Context& /*context*/) {
  const int64_t rows = a.packs.back();
  std::vector<float> inverse(static_cast<size_t>(rows));
  for (int64_t r = 0; r < rows; ++r) {
    const Bf16* x = a.x + r * a.columns;
    inverse[static_cast<size_t>(r)] = InverseOf(x, a.columns, a.eps);
    NormGradientRow(x, a.weight, a.dy + r * a.columns, a.columns, inverse[static_cast<size_t>(r)],
                    a.dx + r * a.columns);
  }
  for (int64_t c = 0; c < a.columns; ++c) {
    a.dw[c] = SumOverPacks(a.packs, [&](int64_t begin, int64_t end) {
      return ColumnSum(begin, end, [&](int64_t r) {
        return contract::NormWeightTerm(a.dy[r * a.columns + c], a.x[r * a.columns + c],
                                        inverse[static_cast<size_t>(r)]);
      });
    });
  }
  return absl::OkStatus();
}

absl::Status Run(const SwiGluGradientArgs& a, Context& /*context*/) {
  for (int64_t r = 0; r < a.rows; ++r) {
    const Bf16* gate = a.gate_up + r * 2 * a.columns;
    Bf16* dgate = a.dgate_up + r * 2 * a.columns;
    for (int64_t c = 0; c < a.columns; ++c) {
      const contract::SwiGluGradient d =
          contract::GradientOfSwiGlu(gate[c], gate[a.columns + c], a.ds[r * a.columns + c]);
      dgate[c] = d.gate;
      dgate[a.columns + c] = d.up;
    }
  }
  return absl::OkStatus();
}

// The cache that serving would fill is here k and v themselves: pages of one position, and the page
// of a row's position is the row.
absl::Status Run(const TrainingQkvArgs& a, Context& context) {
  if (a.rows == 0) return absl::OkStatus();
  const int64_t ld = int64_t{a.heads + 2 * a.kv_heads} * a.head_dim;
  std::vector<Bf16> qkv(a.qkv, a.qkv + a.rows * ld);
  std::vector<int32_t> pages(
      static_cast<size_t>(*std::max_element(a.positions, a.positions + a.rows)) + 1);
  for (int64_t r = 0; r < a.rows; ++r) {
    pages[static_cast<size_t>(a.positions[r])] = static_cast<int32_t>(r);
    const SequenceRows row = {
        .first_row = r, .num_rows = 1, .first_position = a.positions[r], .pages = pages.data()};
    ISOBIT_RETURN_IF_ERROR(Run(QkvArgs{.qkv = qkv.data(),
                                       .ld = ld,
                                       .heads = a.heads,
                                       .q_norm = a.q_norm,
                                       .k_norm = a.k_norm,
                                       .eps = a.eps,
                                       .cosine = a.cosine,
                                       .sine = a.sine,
                                       .sequences = {.host = {&row, 1}},
                                       .kv = {a.k, a.v, 1, a.kv_heads, a.head_dim}},
                               context));
    std::copy_n(qkv.data() + r * ld, a.heads * a.head_dim, a.q + r * a.heads * a.head_dim);
  }
  return absl::OkStatus();
}

absl::Status Run(const QkvGradientArgs& a, Context& /*context*/) {
  const TrainingQkvArgs& f = a.forward;
  const int64_t q_columns = int64_t{f.heads} * f.head_dim;
  const int64_t kv_columns = int64_t{f.kv_heads} * f.head_dim;
  HeadsGradient(a, 0, f.heads, a.dq, f.q_norm, a.dq_norm);
  HeadsGradient(a, q_columns, f.kv_heads, a.dk, f.k_norm, a.dk_norm);
  for (int64_t r = 0; r < f.rows; ++r) {
    std::copy_n(a.dv + r * kv_columns, kv_columns,
                a.dqkv + r * (q_columns + 2 * kv_columns) + q_columns + kv_columns);
  }
  return absl::OkStatus();
}

absl::Status Run(const EmbeddingGradientArgs& a, Context& /*context*/) {
  const EmbeddingRows& t = a.table;
  for (int64_t i = 0; i < t.num_ids; ++i) {
    for (int64_t c = 0; c < a.hidden; ++c) {
      int64_t pack = 0;
      float* out = a.dtable + t.ids[i] * a.hidden + c;
      *out = SumOverPacks(a.packs, [&](int64_t begin, int64_t end) {
        float sum =
            a.head_sums != nullptr ? a.head_sums[(pack * t.num_ids + i) * a.hidden + c] : 0.0f;
        ++pack;
        for (int32_t j = t.starts[i]; j < t.starts[i + 1]; ++j) {
          if (t.rows[j] < begin || t.rows[j] >= end) continue;
          sum = contract::Add(sum, contract::Bf16ToFloat(a.dy[t.rows[j] * a.hidden + c]));
        }
        return sum;
      });
    }
  }
  return absl::OkStatus();
}

}  // namespace isobit::oracle
