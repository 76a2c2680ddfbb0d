// One worker's scores, sums of rows and sums of keys, tile by tile.
#include "kernels/cpu/training_attention.h"

#include <algorithm>
#include <cstddef>

#include "common/base/round_up.h"
#include "kernels/contract/constants.h"
#include "kernels/contract/gradients.h"
#include "kernels/cpu/context.h"

namespace isobit::cpu {
namespace {

constexpr int64_t kTile = 64;   // keys
constexpr int64_t kBlock = 64;  // rows
static_assert(kTile % kPanelColumns == 0 && kBlock % kPanelColumns == 0);

// The rows of one head in one sequence, padded with +0 to whole blocks and panels.
struct HeadRows {
  std::vector<Bf16> rows;  // [padded rows][padded d]
  ExponentRange range;     // of all of them
};

// The same as columns: panels of 32 rows.
struct HeadColumns {
  std::vector<Bf16> panels;           // [padded rows / 32][padded d][32]
  std::vector<ExponentRange> ranges;  // [padded rows / 32]
};

}  // namespace

void ClearOutside(const PassSequences& sequences, int64_t rows, int64_t width, Bf16* x) {
  const bool none = sequences.bounds.empty();
  std::fill_n(x, (none ? rows : sequences.bounds.front()) * width, Bf16{0});
  if (!none) std::fill(x + sequences.bounds.back() * width, x + rows * width, Bf16{0});
}

// The buffers and steps of one KV head of one sequence.
class AttentionGradientOp::Worker {
 public:
  Worker(MmaPanelsFn mma, const RowKernels& rows) : mma_(mma), kernels_(rows) {}

  void Run(const AttentionGradientArgs& a, int64_t first_row, int64_t n, int32_t kv_head);

 private:
  // What the tiles read of one query head.
  struct Query {
    HeadRows q;
    HeadRows dout;
    HeadColumns q_columns;
    HeadColumns dout_columns;
    std::vector<float> log_sums;     // [padded rows]
    std::vector<float> output_dots;  // D, [padded rows]
    std::vector<float> dq;           // [padded rows][padded d], before its scale
  };

  void LoadRows(const Bf16* x, int64_t heads, int64_t head, HeadRows* out) const;
  void LoadColumns(const HeadRows& rows, HeadColumns* out) const;
  void LoadQuery(int32_t head, Query* query) const;
  // All blocks of one query head, for the tile of keys that begins at `key`.
  void RunTile(Query& query, int64_t key);
  // dst [kTile][kBlock] = keys [key, key + kTile) times rows [row, row + kBlock).
  void Scores(const HeadRows& keys, int64_t key, const HeadColumns& columns, int64_t row,
              std::vector<float>& dst) const;
  // chains [kTile][padded d] += weights [kTile][kBlock] times rows [row, row + kBlock).
  void AddRows(const std::vector<Bf16>& weights, const HeadRows& rows, int64_t row,
               std::vector<float>& chains) const;
  void AddKeys(Query& query, int64_t key, int64_t row);
  void Store(const float* chains, int64_t row, int64_t rows, int64_t heads, int64_t head,
             float scale, Bf16* out) const;

  MmaPanelsFn mma_;
  const RowKernels& kernels_;
  const AttentionGradientArgs* a_ = nullptr;
  int64_t first_row_ = 0;
  int64_t n_ = 0;         // rows of the sequence
  int64_t padded_n_ = 0;  // whole blocks
  int64_t padded_d_ = 0;  // whole panels
  int64_t d_ = 0;
  int64_t padded_dots_ = 0;  // head_dim in whole k16 steps
  HeadRows k_;
  HeadRows v_;
  std::vector<Query> queries_;  // of the KV head
  std::vector<float> dk_;       // [kTile][padded d]
  std::vector<float> dv_;
  std::vector<float> scores_;                      // [kTile][kBlock]
  std::vector<float> value_dots_;                  // likewise
  std::vector<Bf16> p_;                            // likewise
  std::vector<Bf16> ds_;                           // likewise
  std::vector<Bf16> ds_rows_;                      // [kBlock][32], keys backwards
  mutable std::vector<ExponentRange> same_range_;  // of each panel of padded d
};

void AttentionGradientOp::Worker::Run(const AttentionGradientArgs& a, int64_t first_row, int64_t n,
                                      int32_t kv_head) {
  a_ = &a;
  first_row_ = first_row;
  n_ = n;
  d_ = a.forward.head_dim;
  padded_n_ = RoundUp(n, std::max(kTile, kBlock));
  padded_d_ = RoundUp(d_, kPanelColumns);
  padded_dots_ = RoundUp(d_, contract::kMmaK);
  scores_.resize(kTile * kBlock);
  value_dots_.resize(kTile * kBlock);
  p_.resize(kTile * kBlock);
  ds_.resize(kTile * kBlock);
  ds_rows_.resize(kBlock * kPanelColumns);
  same_range_.resize(static_cast<size_t>(padded_d_ / kPanelColumns));
  const int32_t group = a.forward.heads / a.forward.kv_heads;
  queries_.resize(static_cast<size_t>(group));

  LoadRows(a.forward.k, a.forward.kv_heads, kv_head, &k_);
  LoadRows(a.forward.v, a.forward.kv_heads, kv_head, &v_);
  for (int32_t h = 0; h < group; ++h) {
    LoadQuery(kv_head * group + h, &queries_[static_cast<size_t>(h)]);
  }
  const float scale = contract::GradientScale(a.forward.head_dim);
  for (int64_t key = (n - 1) / kTile * kTile; key >= 0; key -= kTile) {
    dk_.assign(static_cast<size_t>(kTile * padded_d_), 0.0f);
    dv_.assign(static_cast<size_t>(kTile * padded_d_), 0.0f);
    for (Query& query : queries_) RunTile(query, key);
    const int64_t keys = std::min(kTile, n - key);
    Store(dk_.data(), key, keys, a.forward.kv_heads, kv_head, scale, a.dk);
    Store(dv_.data(), key, keys, a.forward.kv_heads, kv_head, 1.0f, a.dv);
  }
  for (int32_t h = 0; h < group; ++h) {
    Store(queries_[static_cast<size_t>(h)].dq.data(), 0, n, a.forward.heads, kv_head * group + h,
          scale, a.dq);
  }
}

void AttentionGradientOp::Worker::LoadRows(const Bf16* x, int64_t heads, int64_t head,
                                           HeadRows* out) const {
  out->rows.assign(static_cast<size_t>(padded_n_ * padded_d_), 0);
  for (int64_t i = 0; i < n_; ++i) {
    std::copy_n(x + ((first_row_ + i) * heads + head) * d_, d_, out->rows.data() + i * padded_d_);
  }
  out->range = kernels_.scan_exponents(out->rows.data(), padded_n_ * padded_d_);
}

void AttentionGradientOp::Worker::LoadColumns(const HeadRows& rows, HeadColumns* out) const {
  out->panels.resize(static_cast<size_t>(padded_n_ * padded_dots_));
  out->ranges.resize(static_cast<size_t>(padded_n_ / kPanelColumns));
  for (int64_t p = 0; p < padded_n_ / kPanelColumns; ++p) {
    const Bf16* pointers[kPanelColumns];
    for (int64_t j = 0; j < kPanelColumns; ++j) {
      pointers[j] = rows.rows.data() + (p * kPanelColumns + j) * padded_d_;
    }
    Bf16* panel = out->panels.data() + p * padded_dots_ * kPanelColumns;
    kernels_.transpose_keys(pointers, d_, padded_dots_, panel);
    out->ranges[static_cast<size_t>(p)] =
        kernels_.scan_exponents(panel, padded_dots_ * kPanelColumns);
  }
}

void AttentionGradientOp::Worker::LoadQuery(int32_t head, Query* query) const {
  const TrainingAttentionArgs& f = a_->forward;
  LoadRows(f.q, f.heads, head, &query->q);
  LoadRows(a_->dout, f.heads, head, &query->dout);
  LoadColumns(query->q, &query->q_columns);
  LoadColumns(query->dout, &query->dout_columns);
  query->log_sums.assign(static_cast<size_t>(padded_n_), 0.0f);
  std::copy_n(f.log_sums + head * f.rows + first_row_, n_, query->log_sums.data());
  query->output_dots.assign(static_cast<size_t>(padded_n_), 0.0f);
  for (int64_t i = 0; i < n_; ++i) {
    query->output_dots[static_cast<size_t>(i)] =
        kernels_.dot_tree(query->dout.rows.data() + i * padded_d_,
                          f.out + ((first_row_ + i) * f.heads + head) * d_, d_);
  }
  query->dq.assign(static_cast<size_t>(padded_n_ * padded_d_), 0.0f);
}

void AttentionGradientOp::Worker::RunTile(Query& query, int64_t key) {
  const int64_t window = a_->forward.window;
  const int64_t last_key = std::min(key + kTile, n_) - 1;
  const int64_t end = window == 0 ? n_ : std::min(n_, last_key + window);  // rows that see any
  for (int64_t row = key / kBlock * kBlock; row < end; row += kBlock) {
    Scores(k_, key, query.q_columns, row, scores_);
    Scores(v_, key, query.dout_columns, row, value_dots_);
    for (int64_t j = 0; j < kTile; ++j) {
      // Rows that see key + j; none sees the padding.
      const int64_t seen_begin = std::clamp(key + j - row, int64_t{0}, kBlock);
      const int64_t seen_end = key + j > last_key ? seen_begin
                               : window == 0      ? std::min(n_ - row, kBlock)
                                             : std::min({n_ - row, key + j + window - row, kBlock});
      kernels_.score_gradients(
          scores_.data() + j * kBlock, value_dots_.data() + j * kBlock, query.log_sums.data() + row,
          query.output_dots.data() + row, a_->forward.scale, static_cast<int>(seen_begin),
          static_cast<int>(seen_end), kBlock, p_.data() + j * kBlock, ds_.data() + j * kBlock);
    }
    AddRows(p_, query.dout, row, dv_);
    AddRows(ds_, query.q, row, dk_);
    AddKeys(query, key, row);
  }
}

void AttentionGradientOp::Worker::Scores(const HeadRows& keys, int64_t key,
                                         const HeadColumns& columns, int64_t row,
                                         std::vector<float>& dst) const {
  std::fill(dst.begin(), dst.end(), 0.0f);
  mma_({.w = {.data = columns.panels.data() + row * padded_dots_,
              .panel_stride = padded_dots_ * kPanelColumns,
              .k_stride = kPanelColumns,
              .ranges = columns.ranges.data() + row / kPanelColumns},
        .panels = kBlock / kPanelColumns,
        .x = keys.rows.data() + key * padded_d_,
        .ldx = padded_d_,
        .rows = kTile,
        .k = padded_dots_,
        .c = dst.data(),
        .ldc = kBlock});
}

void AttentionGradientOp::Worker::AddRows(const std::vector<Bf16>& weights, const HeadRows& rows,
                                          int64_t row, std::vector<float>& chains) const {
  std::fill(same_range_.begin(), same_range_.end(), rows.range);
  mma_({.w = {.data = rows.rows.data() + row * padded_d_,
              .panel_stride = kPanelColumns,
              .k_stride = padded_d_,
              .ranges = same_range_.data()},
        .panels = padded_d_ / kPanelColumns,
        .x = weights.data(),
        .ldx = kBlock,
        .rows = kTile,
        .k = kBlock,
        .c = chains.data(),
        .ldc = padded_d_});
}

// Continues dq's chains of rows [row, row + kBlock) over the tile's keys. Both operands are read
// backwards: whole steps from the last to the first, and a step's own order changes no bit (C1).
void AttentionGradientOp::Worker::AddKeys(Query& query, int64_t key, int64_t row) {
  std::fill(same_range_.begin(), same_range_.end(), k_.range);
  for (int64_t first = kTile - kPanelColumns; first >= 0; first -= kPanelColumns) {
    const Bf16* pointers[kPanelColumns];
    for (int64_t j = 0; j < kPanelColumns; ++j) {
      pointers[j] = ds_.data() + (first + kPanelColumns - 1 - j) * kBlock;
    }
    kernels_.transpose_keys(pointers, kBlock, kBlock, ds_rows_.data());
    mma_({.w = {.data = k_.rows.data() + (key + first + kPanelColumns - 1) * padded_d_,
                .panel_stride = kPanelColumns,
                .k_stride = -padded_d_,
                .ranges = same_range_.data()},
          .panels = padded_d_ / kPanelColumns,
          .x = ds_rows_.data(),
          .ldx = kPanelColumns,
          .rows = kBlock,
          .k = kPanelColumns,
          .c = query.dq.data() + row * padded_d_,
          .ldc = padded_d_});
  }
}

// Rows [row, row + rows) of a head of out [all rows][heads][d] = bf16(chains * scale).
void AttentionGradientOp::Worker::Store(const float* chains, int64_t row, int64_t rows,
                                        int64_t heads, int64_t head, float scale, Bf16* out) const {
  for (int64_t i = 0; i < rows; ++i) {
    kernels_.scale_to_bf16(chains + i * padded_d_, scale,
                           out + ((first_row_ + row + i) * heads + head) * d_, d_);
  }
}

AttentionGradientOp::AttentionGradientOp(MmaPanelsFn mma, const RowKernels& rows, ThreadPool& pool)
    : pool_(pool), workers_(static_cast<size_t>(pool.num_threads()), Worker(mma, rows)) {}

AttentionGradientOp::~AttentionGradientOp() = default;

void AttentionGradientOp::Run(const AttentionGradientArgs& a) {
  const TrainingAttentionArgs& f = a.forward;
  ClearOutside(f.sequences, f.rows, int64_t{f.heads} * f.head_dim, a.dq);
  ClearOutside(f.sequences, f.rows, int64_t{f.kv_heads} * f.head_dim, a.dk);
  ClearOutside(f.sequences, f.rows, int64_t{f.kv_heads} * f.head_dim, a.dv);
  const absl::Span<const int32_t> bounds = f.sequences.bounds;
  if (bounds.empty()) return;
  pool_.ParallelFor((static_cast<int64_t>(bounds.size()) - 1) * f.kv_heads, 1,
                    [&](int64_t begin, int64_t end, int worker) {
                      for (int64_t i = begin; i < end; ++i) {
                        const auto s = static_cast<size_t>(i / f.kv_heads);
                        if (bounds[s] == bounds[s + 1]) continue;
                        workers_[static_cast<size_t>(worker)].Run(
                            a, bounds[s], bounds[s + 1] - bounds[s],
                            static_cast<int32_t>(i % f.kv_heads));
                      }
                    });
}

absl::Status Run(const AttentionGradientArgs& a, Context& context) {
  context.attention_gradient.Run(a);
  return absl::OkStatus();
}

}  // namespace isobit::cpu
