// Digests of each site, and how those of the ranks are joined.
#include "kernels/model/forward_probe.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <thread>

#include "common/base/check.h"
#include "common/base/parallel_for.h"
#include "common/base/status_macros.h"
#include "kernels/ops/paged_kv.h"

namespace isobit {
namespace {

// From so many elements on, threads share the sums of a result.
constexpr int64_t kParallelElements = int64_t{1} << 18;

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
    : shape_(shape), num_layers_(config.num_layers), wanted_(wanted) {}

template <typename T, typename Look>
absl::Status ForwardProbe::Fetch(const T* data, int64_t elements, const Look& look) {
  if (device_ == nullptr) {
    look(data);
    return absl::OkStatus();
  }
  ISOBIT_RETURN_IF_ERROR(meet_());
  const size_t bytes = static_cast<size_t>(elements) * sizeof(T);
  if (fetched_.size() < bytes) fetched_.resize(bytes);
  ISOBIT_RETURN_IF_ERROR(device_->Copy(fetched_.data(), data, bytes));
  ISOBIT_RETURN_IF_ERROR(device_->Synchronize());
  look(reinterpret_cast<const T*>(fetched_.data()));
  return meet_();
}

template <typename BitsOf>
void ForwardProbe::Take(const ProbeSite& site, const Part& part, const BitsOf& bits_of,
                        bool is_whole) {
  std::vector<uint64_t> row_digests(static_cast<size_t>(part.rows));
  const auto digest_row = [&](size_t r, size_t /*worker*/) {
    const auto row = static_cast<int64_t>(r);
    for (int64_t c = 0; c < part.columns; ++c) {
      row_digests[r] += WordOf(part.first_row + row, part.first_column + c, bits_of(row, c));
    }
    return absl::OkStatus();
  };
  const size_t cores = std::max(1u, std::thread::hardware_concurrency());
  const bool is_small = part.rows * part.columns < kParallelElements;
  const size_t num_workers =
      is_small ? 1 : std::max<size_t>(1, cores / static_cast<size_t>(shape_.size));
  ISOBIT_CHECK(ParallelFor(row_digests.size(), num_workers, digest_row).ok());

  const uint64_t digest = std::accumulate(row_digests.begin(), row_digests.end(), uint64_t{0});
  const auto known = std::find_if(seen_.begin(), seen_.end(),
                                  [&](const Seen& seen) { return seen.digest.site == site; });
  if (known != seen_.end()) {
    known->digest.digest += digest;
  } else {
    seen_.push_back({.digest = {site, digest}, .is_whole = is_whole});
  }
  if (wanted_.site != site) return;
  const auto first_row = static_cast<size_t>(part.first_row);
  row_digests_.resize(std::max(row_digests_.size(), first_row + row_digests.size()));
  for (size_t r = 0; r < row_digests.size(); ++r) row_digests_[first_row + r] += row_digests[r];
  const int64_t row = wanted_.row.value_or(-1) - part.first_row;
  if (row < 0 || row >= part.rows) return;
  const auto first_column = static_cast<size_t>(part.first_column);
  const auto columns = static_cast<size_t>(part.columns);
  values_.resize(std::max(values_.size(), first_column + columns));
  for (size_t c = 0; c < columns; ++c) {
    values_[first_column + c] = bits_of(row, static_cast<int64_t>(c));
  }
}

absl::Status ForwardProbe::SeeWhole(const ProbeSite& site, const Bf16* data, int64_t rows,
                                    int64_t columns) {
  return Fetch(data, rows * columns, [&](const Bf16* host) {
    Take(
        site, {.rows = rows, .columns = columns},
        [&](int64_t r, int64_t c) { return Widened(host[r * columns + c]); }, /*is_whole=*/true);
  });
}

absl::Status ForwardProbe::SeeColumns(const ProbeSite& site, const Bf16* data, int64_t rows,
                                      int64_t ld, absl::Span<const Columns> columns) {
  return Fetch(data, rows * ld, [&](const Bf16* host) {
    for (const Columns& run : columns) {
      Take(site, {.rows = rows, .first_column = run.first, .columns = run.count},
           [&](int64_t r, int64_t c) { return Widened(host[r * ld + run.from + c]); });
    }
  });
}

absl::Status ForwardProbe::SeeCache(int layer, const PagedKv& kv, const SequenceRows& sequence) {
  const int64_t end = sequence.first_position + sequence.num_rows;
  const int64_t num_pages = (end + kv.page_size - 1) / kv.page_size;
  const int64_t last_page = *std::max_element(sequence.pages, sequence.pages + num_pages);
  const int64_t head_dim = kv.head_dim;
  const int64_t page_elements = int64_t{kv.kv_heads} * kv.page_size * head_dim;
  const auto see = [&](ProbeOp op, const Bf16* cache) {
    return Fetch(cache, (last_page + 1) * page_elements, [&](const Bf16* host) {
      Take({layer, op},
           {.rows = sequence.num_rows,
            .first_column = shape_.kv_heads.begin * head_dim,
            .columns = shape_.kv_heads.size() * head_dim},
           [&](int64_t r, int64_t c) {
             const int64_t position = sequence.first_position + r;
             const int64_t page = sequence.pages[position / kv.page_size];
             const int64_t row = c / head_dim * kv.page_size + position % kv.page_size;
             return Widened(host[page * page_elements + row * head_dim + c % head_dim]);
           });
    });
  };
  ISOBIT_RETURN_IF_ERROR(see(ProbeOp::kK, kv.k));
  return see(ProbeOp::kV, kv.v);
}

absl::Status ForwardProbe::SeeLogits(const float* logits, int64_t row) {
  return Fetch(logits, shape_.vocab.size(), [&](const float* host) {
    Take({num_layers_, ProbeOp::kLogits},
         {.first_row = row,
          .rows = 1,
          .first_column = shape_.vocab.begin,
          .columns = shape_.vocab.size()},
         [&](int64_t, int64_t c) { return std::bit_cast<uint32_t>(host[c]); });
  });
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
