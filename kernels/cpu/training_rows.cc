// Sums over the rows of packs, and the gradients that need them.
#include "kernels/cpu/training_rows.h"

#include <algorithm>
#include <cstddef>

#include "common/base/round_up.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cpu/attention.h"
#include "kernels/cpu/row_ops.h"

namespace isobit::cpu {
namespace {

float InverseOf(const RowKernels& rows, const Bf16* x, int64_t n, float eps) {
  return contract::InverseRms(rows.sum_of_squares(x, n), n, eps);
}

}  // namespace

TrainingRows::TrainingRows(const RowKernels& rows, ThreadPool& pool)
    : rows_(rows),
      pool_(pool),
      worker_sums_(static_cast<size_t>(pool.num_threads())),
      worker_heads_(static_cast<size_t>(pool.num_threads())) {}

void TrainingRows::SumRows(PackBounds packs, int64_t n, AddRow add) {
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

  sums_.assign(blocks.size() * static_cast<size_t>(n), 0.0f);
  pool_.ParallelFor(static_cast<int64_t>(blocks.size()), 1,
                    [&](int64_t begin, int64_t end, int worker) {
                      for (int64_t b = begin; b < end; ++b) {
                        const Block& block = blocks[static_cast<size_t>(b)];
                        for (int64_t r = block.begin; r < block.end; ++r) {
                          add(r, sums_.data() + b * n, worker);
                        }
                      }
                    });
  for (size_t p = 0; p + 1 < packs.size(); ++p) {
    float* pack = sums_.data() + first_block[p] * static_cast<size_t>(n);
    rows_.join_segments(SegmentSum::kChain, pack, n,
                        static_cast<int>(first_block[p + 1] - first_block[p]), nullptr, n);
    if (first_block[p] > p) std::copy_n(pack, n, sums_.data() + static_cast<int64_t>(p) * n);
  }
}

void TrainingRows::JoinPacks(PackBounds packs, float* sums, int64_t stride, int64_t n,
                             float* out) const {
  rows_.join_segments(SegmentSum::kTree, sums, stride, static_cast<int>(packs.size()) - 1, nullptr,
                      n);
  std::copy_n(sums, n, out);
}

void TrainingRows::ColumnSums(const ColumnSumsArgs& a) {
  SumRows(a.packs, a.columns,
          [&](int64_t r, float* sums, int) { rows_.add_row(a.x + r * a.ldx, a.columns, sums); });
  JoinPacks(a.packs, sums_.data(), a.columns, a.columns, a.out);
}

void TrainingRows::RmsNormGradient(const RmsNormGradientArgs& a) {
  SumRows(a.packs, a.columns, [&](int64_t r, float* sums, int) {
    const Bf16* x = a.x + r * a.columns;
    const Bf16* dy = a.dy + r * a.columns;
    const float inverse = InverseOf(rows_, x, a.columns, a.eps);
    rows_.norm_gradient(x, a.weight, dy, inverse, a.columns, a.dx + r * a.columns);
    rows_.add_norm_terms(dy, x, inverse, a.columns, sums);
  });
  JoinPacks(a.packs, sums_.data(), a.columns, a.columns, a.dw);
}

void TrainingRows::SwiGluGradient(const SwiGluGradientArgs& a) {
  pool_.ParallelFor(a.rows, kRowGrain, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const Bf16* gate = a.gate_up + r * 2 * a.columns;
      Bf16* dgate = a.dgate_up + r * 2 * a.columns;
      rows_.swiglu_gradient(gate, gate + a.columns, a.ds + r * a.columns, dgate, dgate + a.columns,
                            a.columns);
    }
  });
}

void TrainingRows::TrainingQkv(const TrainingQkvArgs& a) {
  const int64_t d = a.head_dim;
  const int64_t q_columns = a.heads * d;
  const int64_t kv_columns = a.kv_heads * d;
  pool_.ParallelFor(a.rows, kRowGrain, [&](int64_t begin, int64_t end, int) {
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
      PrepareHeads(rows_, a.heads, d, a.q_norm, a.eps, cosine, sine, q);
      PrepareHeads(rows_, a.kv_heads, d, a.k_norm, a.eps, cosine, sine, k);
      for (int64_t h = 0; h < a.kv_heads; ++h) PoisonHead(d, k + h * d, v + h * d);
    }
  });
}

void TrainingRows::QkvGradient(const QkvGradientArgs& a) {
  const TrainingQkvArgs& f = a.forward;
  const int64_t d = f.head_dim;
  const int64_t heads = f.heads + f.kv_heads;  // those of q, then those of k
  const int64_t ld = (heads + f.kv_heads) * d;
  for (std::vector<Bf16>& head : worker_heads_) head.resize(static_cast<size_t>(d));
  SumRows(a.packs, heads * d, [&](int64_t r, float* sums, int worker) {
    const float* cosine = f.cosine + f.positions[r] * (d / 2);
    const float* sine = f.sine + f.positions[r] * (d / 2);
    Bf16* head = worker_heads_[static_cast<size_t>(worker)].data();
    for (int64_t h = 0; h < heads; ++h) {
      const bool is_q = h < f.heads;
      const Bf16* norm = is_q ? f.q_norm : f.k_norm;
      Bf16* dx = a.dqkv + r * ld + h * d;
      Bf16* dy = norm != nullptr ? head : dx;
      std::copy_n(is_q ? a.dq + (r * f.heads + h) * d : a.dk + (r * f.kv_heads + h - f.heads) * d,
                  d, dy);
      rows_.rotate_back(dy, dy + d / 2, cosine, sine, d / 2);
      if (norm == nullptr) continue;
      const Bf16* x = f.qkv + r * ld + h * d;
      const float inverse = InverseOf(rows_, x, d, f.eps);
      rows_.norm_gradient(x, norm, dy, inverse, d, dx);
      rows_.add_norm_terms(dy, x, inverse, d, sums + h * d);
    }
    std::copy_n(a.dv + r * f.kv_heads * d, f.kv_heads * d, a.dqkv + r * ld + heads * d);
  });
  if (f.q_norm != nullptr && a.dq_norm != nullptr) {
    JoinHeads(a.packs, heads * d, 0, f.heads, d, a.dq_norm);
  }
  if (f.k_norm != nullptr && a.dk_norm != nullptr) {
    JoinHeads(a.packs, heads * d, f.heads * d, f.kv_heads, d, a.dk_norm);
  }
}

void TrainingRows::JoinHeads(PackBounds packs, int64_t n, int64_t first, int64_t heads, int64_t d,
                             float* out) {
  for (size_t p = 0; p + 1 < packs.size(); ++p) {
    rows_.join_segments(SegmentSum::kChain, sums_.data() + static_cast<int64_t>(p) * n + first, d,
                        static_cast<int>(heads), nullptr, d);
  }
  JoinPacks(packs, sums_.data() + first, n, d, out);
}

void TrainingRows::EmbeddingGradient(const EmbeddingGradientArgs& a) {
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
        rows_.add_row(a.dy + t.rows[next] * a.hidden, a.hidden, sum);
      }
    }
    JoinPacks(a.packs, sums.data(), a.hidden, a.hidden, a.dtable + t.ids[i] * a.hidden);
  };
  pool_.ParallelFor(t.num_ids, kRowGrain, [&](int64_t begin, int64_t end, int worker) {
    for (int64_t i = begin; i < end; ++i) run(i, worker_sums_[static_cast<size_t>(worker)]);
  });
}

}  // namespace isobit::cpu
