// The row functions of training and their gradients (C11, C12).

#include <algorithm>
#include <cstddef>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cpu/context.h"

namespace isobit::cpu {
namespace {

float InverseOf(const RowKernels& rows, const Bf16* x, int64_t n, float eps) {
  return contract::InverseRms(rows.sum_of_squares(x, n), n, eps);
}

// Adds row `row` to the sums of its block.
using AddRow = absl::FunctionRef<void(int64_t row, float* sums, int worker)>;

// The sums of each pack [packs][n]: calls add for all rows, those of a block of 64 in order, and
// combines each pack's blocks. (The result is longer: what follows the sums is of no use.)
std::vector<float> SumRows(PackBounds packs, int64_t n, Context& context, AddRow add) {
  struct Block {
    int64_t begin;
    int64_t end;
  };
  std::vector<Block> blocks;
  std::vector<size_t> first_block;  // of each pack
  for (size_t p = 0; p + 1 < packs.size(); ++p) {
    first_block.push_back(blocks.size());
    for (int64_t r = packs[p]; r < packs[p + 1]; r += contract::kColumnSumRows) {
      blocks.push_back({r, std::min(r + contract::kColumnSumRows, packs[p + 1])});
    }
    if (packs[p] == packs[p + 1]) blocks.push_back({packs[p], packs[p]});  // its sum is +0
  }
  first_block.push_back(blocks.size());

  std::vector<float> sums(blocks.size() * static_cast<size_t>(n), 0.0f);
  context.pool.ParallelFor(static_cast<int64_t>(blocks.size()), 1,
                           [&](int64_t begin, int64_t end, int worker) {
                             for (int64_t b = begin; b < end; ++b) {
                               const Block& block = blocks[static_cast<size_t>(b)];
                               for (int64_t r = block.begin; r < block.end; ++r) {
                                 add(r, sums.data() + b * n, worker);
                               }
                             }
                           });
  for (size_t p = 0; p + 1 < packs.size(); ++p) {
    float* pack = sums.data() + first_block[p] * static_cast<size_t>(n);
    context.rows.join_segments(SegmentSum::kChain, pack, n,
                               static_cast<int>(first_block[p + 1] - first_block[p]), nullptr, n);
    if (first_block[p] > p) std::copy_n(pack, n, sums.data() + static_cast<int64_t>(p) * n);
  }
  return sums;
}

// out [n] = the sum over packs; pack p's sums are at sums + p * stride. Overwrites the sums.
void JoinPacks(PackBounds packs, float* sums, int64_t stride, int64_t n, const RowKernels& rows,
               float* out) {
  rows.join_segments(SegmentSum::kTree, sums, stride, static_cast<int>(packs.size()) - 1, nullptr,
                     n);
  std::copy_n(sums, n, out);
}

// out [d] = the norm weight's gradient, from the sums of `heads` heads, which are at columns
// [first, ...) of sums [packs][n].
void JoinHeads(PackBounds packs, int64_t n, int64_t first, int64_t heads, int64_t d, float* sums,
               const RowKernels& rows, float* out) {
  for (size_t p = 0; p + 1 < packs.size(); ++p) {
    rows.join_segments(SegmentSum::kChain, sums + static_cast<int64_t>(p) * n + first, d,
                       static_cast<int>(heads), nullptr, d);
  }
  JoinPacks(packs, sums + first, n, d, rows, out);
}

}  // namespace

absl::Status Run(const ColumnSumsArgs& a, Context& context) {
  std::vector<float> sums =
      SumRows(a.packs, a.columns, context, [&](int64_t r, float* row_sums, int) {
        context.rows.add_row(a.x + r * a.ldx, a.columns, row_sums);
      });
  JoinPacks(a.packs, sums.data(), a.columns, a.columns, context.rows, a.out);
  return absl::OkStatus();
}

absl::Status Run(const RmsNormGradientArgs& a, Context& context) {
  std::vector<float> sums =
      SumRows(a.packs, a.columns, context, [&](int64_t r, float* row_sums, int) {
        const Bf16* x = a.x + r * a.columns;
        const Bf16* dy = a.dy + r * a.columns;
        const float inverse = InverseOf(context.rows, x, a.columns, a.eps);
        context.rows.norm_gradient(x, a.weight, dy, inverse, a.columns, a.dx + r * a.columns);
        context.rows.add_norm_terms(dy, x, inverse, a.columns, row_sums);
      });
  JoinPacks(a.packs, sums.data(), a.columns, a.columns, context.rows, a.dw);
  return absl::OkStatus();
}

absl::Status Run(const SwiGluGradientArgs& a, Context& context) {
  context.pool.ParallelFor(a.rows, kRowGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const Bf16* gate = a.gate_up + r * 2 * a.columns;
      Bf16* dgate = a.dgate_up + r * 2 * a.columns;
      context.rows.swiglu_gradient(gate, gate + a.columns, a.ds + r * a.columns, dgate,
                                   dgate + a.columns, a.columns);
    }
  });
  return absl::OkStatus();
}

absl::Status Run(const TrainingQkvArgs& a, Context& context) {
  const int64_t d = a.head_dim;
  const int64_t q_columns = a.heads * d;
  const int64_t kv_columns = a.kv_heads * d;
  context.pool.ParallelFor(a.rows, kRowGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const Bf16* row = a.qkv + r * (q_columns + 2 * kv_columns);
      const float* cosine = a.cosine + a.positions[r] * (d / 2);
      const float* sine = a.sine + a.positions[r] * (d / 2);
      Bf16* q = a.q + r * q_columns;
      Bf16* k = a.k + r * kv_columns;
      Bf16* v = a.v + r * kv_columns;
      std::copy_n(row, q_columns, q);
      std::copy_n(row + q_columns, kv_columns, k);
      std::copy_n(row + q_columns + kv_columns, kv_columns, v);
      PrepareHeads(context.rows, a.heads, d, a.q_norm, a.eps, cosine, sine, q);
      PrepareHeads(context.rows, a.kv_heads, d, a.k_norm, a.eps, cosine, sine, k);
      for (int64_t h = 0; h < a.kv_heads; ++h) PoisonHead(d, k + h * d, v + h * d);
    }
  });
  return absl::OkStatus();
}

absl::Status Run(const QkvGradientArgs& a, Context& context) {
  const TrainingQkvArgs& f = a.forward;
  const int64_t d = f.head_dim;
  const int64_t heads = f.heads + f.kv_heads;  // those of q, then those of k
  const int64_t ld = (heads + f.kv_heads) * d;
  std::vector<std::vector<Bf16>> worker_heads(static_cast<size_t>(context.pool.num_threads()),
                                              std::vector<Bf16>(static_cast<size_t>(d)));
  std::vector<float> sums =
      SumRows(a.packs, heads * d, context, [&](int64_t r, float* row_sums, int worker) {
        const float* cosine = f.cosine + f.positions[r] * (d / 2);
        const float* sine = f.sine + f.positions[r] * (d / 2);
        Bf16* head = worker_heads[static_cast<size_t>(worker)].data();
        for (int64_t h = 0; h < heads; ++h) {
          const bool is_q = h < f.heads;
          const Bf16* norm = is_q ? f.q_norm : f.k_norm;
          Bf16* dx = a.dqkv + r * ld + h * d;
          Bf16* dy = norm != nullptr ? head : dx;
          std::copy_n(
              is_q ? a.dq + (r * f.heads + h) * d : a.dk + (r * f.kv_heads + h - f.heads) * d, d,
              dy);
          context.rows.rotate_back(dy, dy + d / 2, cosine, sine, d / 2);
          if (norm == nullptr) continue;
          const Bf16* x = f.qkv + r * ld + h * d;
          const float inverse = InverseOf(context.rows, x, d, f.eps);
          context.rows.norm_gradient(x, norm, dy, inverse, d, dx);
          context.rows.add_norm_terms(dy, x, inverse, d, row_sums + h * d);
        }
        std::copy_n(a.dv + r * f.kv_heads * d, f.kv_heads * d, a.dqkv + r * ld + heads * d);
      });
  if (f.q_norm != nullptr && a.dq_norm != nullptr) {
    JoinHeads(a.packs, heads * d, 0, f.heads, d, sums.data(), context.rows, a.dq_norm);
  }
  if (f.k_norm != nullptr && a.dk_norm != nullptr) {
    JoinHeads(a.packs, heads * d, f.heads * d, f.kv_heads, d, sums.data(), context.rows, a.dk_norm);
  }
  return absl::OkStatus();
}

absl::Status Run(const EmbeddingGradientArgs& a, Context& context) {
  const EmbeddingRows& t = a.table;
  const auto num_packs = static_cast<int64_t>(a.packs.size()) - 1;
  const auto run = [&](int64_t i, std::vector<float>& sums) {
    sums.assign(static_cast<size_t>(num_packs * a.hidden), 0.0f);
    int32_t next = t.starts[i];
    for (int64_t p = 0; p < num_packs; ++p) {
      float* sum = sums.data() + p * a.hidden;
      if (a.head_sums != nullptr) {
        std::copy_n(a.head_sums + (p * t.num_ids + i) * a.hidden, a.hidden, sum);
      }
      const int64_t end = a.packs[static_cast<size_t>(p) + 1];
      for (; next < t.starts[i + 1] && t.rows[next] < end; ++next) {
        context.rows.add_row(a.dy + t.rows[next] * a.hidden, a.hidden, sum);
      }
    }
    JoinPacks(a.packs, sums.data(), a.hidden, a.hidden, context.rows,
              a.dtable + t.ids[i] * a.hidden);
  };
  std::vector<std::vector<float>> worker_sums(static_cast<size_t>(context.pool.num_threads()));
  context.pool.ParallelFor(t.num_ids, kRowGrain, [&](int64_t begin, int64_t end, int worker) {
    for (int64_t i = begin; i < end; ++i) run(i, worker_sums[static_cast<size_t>(worker)]);
  });
  return absl::OkStatus();
}

}  // namespace isobit::cpu
