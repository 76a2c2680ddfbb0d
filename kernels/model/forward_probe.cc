// See forward_probe.h.
#include "kernels/model/forward_probe.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "common/base/check.h"

namespace isobit {
namespace {

// A word of an element, of which sums tell matrices apart (the finaliser of SplitMix64).
uint64_t WordOf(int64_t row, int64_t column, uint32_t bits) {
  uint64_t x = static_cast<uint64_t>(row + 1) * 0x9E3779B97F4A7C15u ^
               static_cast<uint64_t>(column + 1) * 0xC2B2AE3D27D4EB4Fu;
  x = (x ^ (x >> 29)) + bits;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

uint32_t Widened(Bf16 value) { return static_cast<uint32_t>(value) << 16; }

}  // namespace

ProbePass::ProbePass(absl::Span<const int32_t> tokens, int32_t page_size)
    : ids(tokens.begin(), tokens.end()),
      pages((ids.size() + static_cast<size_t>(page_size) - 1) / static_cast<size_t>(page_size)) {
  std::iota(pages.begin(), pages.end(), 0);
  sequence = {.first_row = 0,
              .num_rows = static_cast<int64_t>(ids.size()),
              .first_position = 0,
              .pages = pages.data()};
}

ForwardProbe::ForwardProbe(const ModelConfig& config, const RankShape& shape,
                           const ProbeWanted& wanted)
    : shape_(shape),
      num_layers_(config.num_layers),
      heads_of_kv_head_(config.num_heads / config.num_kv_heads),
      kv_heads_(config.num_kv_heads),
      head_dim_(config.head_dim),
      wanted_(wanted) {}

template <typename BitsOf>
void ForwardProbe::Take(const ProbeSite& site, const Part& part, const BitsOf& bits_of,
                        bool is_whole) {
  const bool is_wanted = wanted_.site == site;
  const auto end_row = static_cast<size_t>(part.first_row + part.rows);
  if (is_wanted && row_digests_.size() < end_row) row_digests_.resize(end_row);
  uint64_t digest = 0;
  for (int64_t r = 0; r < part.rows; ++r) {
    const int64_t row = part.first_row + r;
    uint64_t row_digest = 0;
    for (int64_t c = 0; c < part.columns; ++c) {
      row_digest += WordOf(row, part.first_column + c, bits_of(r, c));
    }
    digest += row_digest;
    if (!is_wanted) continue;
    row_digests_[static_cast<size_t>(row)] += row_digest;
    if (wanted_.row != row) continue;
    const auto end = static_cast<size_t>(part.first_column + part.columns);
    if (values_.size() < end) values_.resize(end);
    for (int64_t c = 0; c < part.columns; ++c) {
      values_[static_cast<size_t>(part.first_column + c)] = bits_of(r, c);
    }
  }
  const auto known = std::find_if(seen_.begin(), seen_.end(),
                                  [&](const Seen& seen) { return seen.digest.site == site; });
  if (known != seen_.end()) {
    known->digest.digest += digest;
  } else {
    seen_.push_back({.digest = {site, digest}, .is_whole = is_whole});
  }
}

void ForwardProbe::SeeWhole(int layer, ProbeOp op, const Bf16* data, int64_t rows,
                            int64_t columns) {
  Take(
      {layer, op}, {.rows = rows, .columns = columns},
      [&](int64_t r, int64_t c) { return Widened(data[r * columns + c]); }, /*is_whole=*/true);
}

void ForwardProbe::See(int layer, ProbeOp op, const Bf16* data, int64_t rows, int64_t columns,
                       int64_t ld, int64_t first_column) {
  Take({layer, op}, {.rows = rows, .first_column = first_column, .columns = columns},
       [&](int64_t r, int64_t c) { return Widened(data[r * ld + c]); });
}

void ForwardProbe::SeeQkv(int layer, const Bf16* qkv, int64_t rows, int64_t ld) {
  const int64_t q_columns = shape_.heads * head_dim_;
  const int64_t kv_columns = shape_.kv_heads.size() * head_dim_;
  const int64_t all_q = kv_heads_ * heads_of_kv_head_ * head_dim_;
  const int64_t all_k = kv_heads_ * head_dim_;
  const int64_t first_kv = shape_.kv_heads.begin * head_dim_;
  See(layer, ProbeOp::kQkv, qkv, rows, q_columns, ld, FirstHead() * head_dim_);
  See(layer, ProbeOp::kQkv, qkv + q_columns, rows, kv_columns, ld, all_q + first_kv);
  See(layer, ProbeOp::kQkv, qkv + q_columns + kv_columns, rows, kv_columns, ld,
      all_q + all_k + first_kv);
}

void ForwardProbe::SeeQueries(int layer, const Bf16* qkv, int64_t rows, int64_t ld) {
  See(layer, ProbeOp::kQ, qkv, rows, shape_.heads * head_dim_, ld, FirstHead() * head_dim_);
}

void ForwardProbe::SeeCache(int layer, const PagedKv& kv, const SequenceRows& sequence) {
  const auto see = [&](ProbeOp op, const Bf16* cache) {
    Take({layer, op},
         {.rows = sequence.num_rows,
          .first_column = shape_.kv_heads.begin * head_dim_,
          .columns = shape_.kv_heads.size() * head_dim_},
         [&](int64_t r, int64_t c) {
           const int64_t position = sequence.first_position + r;
           const int64_t page = sequence.pages[position / kv.page_size];
           const int64_t head = c / head_dim_;
           const int64_t slot = position % kv.page_size;
           return Widened(cache[((page * kv.kv_heads + head) * kv.page_size + slot) * head_dim_ +
                                c % head_dim_]);
         });
  };
  see(ProbeOp::kK, kv.k);
  see(ProbeOp::kV, kv.v);
}

void ForwardProbe::SeeAttention(int layer, const Bf16* attended, int64_t rows, int64_t ld) {
  See(layer, ProbeOp::kAttention, attended, rows, shape_.heads * head_dim_, ld,
      FirstHead() * head_dim_);
}

void ForwardProbe::SeeLogits(const float* logits, int64_t row) {
  Take({num_layers_, ProbeOp::kLogits},
       {.first_row = row,
        .rows = 1,
        .first_column = shape_.vocab.begin,
        .columns = shape_.vocab.size()},
       [&](int64_t, int64_t c) { return std::bit_cast<uint32_t>(logits[c]); });
}

ProbeReport ForwardProbe::Merge(absl::Span<const ForwardProbe> ranks) {
  ProbeReport report;
  for (size_t i = 0; i < ranks.front().seen_.size(); ++i) {
    const Seen& first = ranks.front().seen_[i];
    std::vector<const ForwardProbe*> parts;  // the ranks whose results count
    for (const ForwardProbe& rank : ranks) {
      ISOBIT_CHECK(rank.seen_.size() == ranks.front().seen_.size() &&
                   rank.seen_[i].digest.site == first.digest.site)
          << "ranks saw different passes";
      const bool differs = rank.seen_[i].digest.digest != first.digest.digest;
      if (first.is_whole && (parts.empty() || differs)) parts = {&rank};
      if (!first.is_whole) parts.push_back(&rank);
    }
    ProbeReport::Digest sum = {first.digest.site, 0};
    for (const ForwardProbe* part : parts) sum.digest += part->seen_[i].digest.digest;
    report.digests.push_back(sum);
    if (ranks.front().wanted_.site == sum.site) AddRows(parts, report);
  }
  return report;
}

void ForwardProbe::AddRows(absl::Span<const ForwardProbe* const> parts, ProbeReport& report) {
  for (const ForwardProbe* part : parts) {
    report.row_digests.resize(std::max(report.row_digests.size(), part->row_digests_.size()));
    for (size_t r = 0; r < part->row_digests_.size(); ++r) {
      report.row_digests[r] += part->row_digests_[r];
    }
    report.values.resize(std::max(report.values.size(), part->values_.size()));
    for (size_t c = 0; c < part->values_.size(); ++c) {
      if (part->values_[c]) report.values[c] = *part->values_[c];
    }
  }
}

}  // namespace isobit
