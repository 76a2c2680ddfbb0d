// The scalar definition of the attention ops, one row and one head at a time. See
// contract/attention.h.
#include "kernels/oracle/attention.h"

#include <algorithm>
#include <vector>

#include "kernels/contract/attention.h"
#include "kernels/contract/gradients.h"
#include "kernels/contract/mma16.h"
#include "kernels/contract/row_functions.h"
#include "kernels/oracle/kernels.h"

namespace isobit::oracle {
namespace {

// Offset of a position's first element in the cache.
int64_t CacheOffset(const PagedKv& kv, const SequenceRows& sequence, int32_t kv_head,
                    int64_t position) {
  const int64_t page = sequence.pages[position / kv.page_size];
  return ((page * kv.kv_heads + kv_head) * kv.page_size + position % kv.page_size) * kv.head_dim;
}

void NormaliseHead(Bf16* head, const Bf16* weight, int32_t head_dim, float eps) {
  const float inverse = contract::InverseRms(contract::SumOfSquares(head, head_dim), head_dim, eps);
  for (int32_t i = 0; i < head_dim; ++i) head[i] = contract::Normalise(head[i], inverse, weight[i]);
}

void RotateHead(Bf16* head, int32_t head_dim, const float* cosine, const float* sine) {
  const int32_t half = head_dim / 2;
  for (int32_t i = 0; i < half; ++i) {
    const contract::Rotated pair = contract::Rotate(head[i], head[half + i], cosine[i], sine[i]);
    head[i] = pair.first;
    head[half + i] = pair.second;
  }
}

// One split of one row and head: (max, sum) and its accumulator acc[head_dim].
contract::SplitSum AttendSplit(const AttentionArgs& a, const SequenceRows& sequence,
                               int64_t position, int32_t kv_head, const Bf16* q,
                               int64_t split_begin, float* acc) {
  const int32_t d = a.kv.head_dim;
  const int32_t tile = contract::KvTile(d);
  contract::SoftmaxRow row;
  std::vector<float> scores(static_cast<size_t>(tile));
  std::fill_n(acc, d, 0.0f);
  for (int64_t begin = split_begin; begin < split_begin + contract::kSplit; begin += tile) {
    bool any = false;
    for (int32_t j = 0; j < tile; ++j) {
      const bool seen = contract::Sees(position, begin + j, a.window);
      any = any || seen;
      scores[static_cast<size_t>(j)] =
          seen ? contract::DotChain(0.0f, q,
                                    a.kv.k + CacheOffset(a.kv, sequence, kv_head, begin + j), d)
               : contract::kMinusInfinity;
    }
    if (!any) continue;
    const float alpha = contract::UpdateSoftmax(row, scores.data(), tile, a.scale);
    for (int32_t e = 0; e < d; ++e) {
      float c = contract::Mul(acc[e], alpha);
      for (int32_t j = 0; j < tile; j += contract::kMmaK) {
        Bf16 p[contract::kMmaK];
        Bf16 v[contract::kMmaK];
        for (int32_t k = 0; k < contract::kMmaK; ++k) {
          const int32_t in_tile = j + k;
          const int64_t key = begin + in_tile;
          p[k] = contract::FloatToBf16(scores[static_cast<size_t>(in_tile)]);
          // Keys after the query are +0 here; a kernel may read their finite values instead, since
          // a product with zero has no exponent (C1).
          v[k] = key <= position ? a.kv.v[CacheOffset(a.kv, sequence, kv_head, key) + e] : Bf16{0};
        }
        c = contract::Mma16(c, p, v);
      }
      acc[e] = c;
    }
  }
  return contract::FinishSplit(row, a.scale);
}

}  // namespace

absl::Status Run(const QkvArgs& a, Context& /*context*/) {
  const int32_t d = a.kv.head_dim;
  for (const SequenceRows& sequence : a.sequences.host) {
    for (int64_t r = 0; r < sequence.num_rows; ++r) {
      Bf16* row = a.qkv + (sequence.first_row + r) * a.ld;
      const int64_t position = sequence.first_position + r;
      const float* cosine = a.cosine + position * (d / 2);
      const float* sine = a.sine + position * (d / 2);
      for (int32_t h = 0; h < a.heads + a.kv.kv_heads; ++h) {
        const Bf16* weight = h < a.heads ? a.q_norm : a.k_norm;
        if (weight != nullptr) NormaliseHead(row + h * d, weight, d, a.eps);
        RotateHead(row + h * d, d, cosine, sine);
      }
      for (int32_t h = 0; h < a.kv.kv_heads; ++h) {
        const int64_t offset = CacheOffset(a.kv, sequence, h, position);
        const Bf16* k = row + (a.heads + h) * d;
        const Bf16* v = row + (a.heads + a.kv.kv_heads + h) * d;
        const bool finite = std::all_of(v, v + d, [](Bf16 x) { return contract::IsFinite(x); });
        for (int32_t i = 0; i < d; ++i) {
          a.kv.k[offset + i] = finite ? k[i] : contract::kPoisonedKey;
          a.kv.v[offset + i] = finite ? v[i] : Bf16{0};
        }
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Run(const AttentionArgs& a, Context& /*context*/) {
  Attend(a, nullptr, 0);
  return absl::OkStatus();
}

void Attend(const AttentionArgs& a, float* log_sums, int64_t ld) {
  const int32_t d = a.kv.head_dim;
  const int32_t heads_per_kv = a.kv.kv_heads > 0 ? a.heads / a.kv.kv_heads : 1;
  std::vector<float> acc(static_cast<size_t>(d));
  std::vector<float> total(static_cast<size_t>(d));
  for (const SequenceRows& sequence : a.sequences.host) {
    for (int64_t r = 0; r < sequence.num_rows; ++r) {
      const int64_t position = sequence.first_position + r;
      for (int32_t h = 0; h < a.heads; ++h) {
        const Bf16* q = a.q + (sequence.first_row + r) * a.ldq + h * d;
        contract::SplitSum sum{contract::kMinusInfinity, 0.0f};
        std::fill(total.begin(), total.end(), 0.0f);
        for (int64_t begin = 0; begin <= position; begin += contract::kSplit) {
          const contract::SplitSum split =
              AttendSplit(a, sequence, position, h / heads_per_kv, q, begin, acc.data());
          if (split.max == contract::kMinusInfinity)
            continue;  // the window starts after this split
          const contract::FoldFactors f = contract::Fold(sum, split);
          for (int32_t e = 0; e < d; ++e) {
            total[static_cast<size_t>(e)] = contract::FoldAccumulator(
                total[static_cast<size_t>(e)], acc[static_cast<size_t>(e)], f);
          }
        }
        if (log_sums != nullptr) {
          log_sums[h * ld + sequence.first_row + r] = contract::LogSumExp2(sum.max, sum.sum);
        }
        const float inverse = contract::Div(1.0f, sum.sum);
        Bf16* out = a.out + (sequence.first_row + r) * a.ldo + h * d;
        for (int32_t e = 0; e < d; ++e) {
          out[e] = contract::FloatToBf16(contract::Mul(total[static_cast<size_t>(e)], inverse));
        }
      }
    }
  }
}

}  // namespace isobit::oracle
