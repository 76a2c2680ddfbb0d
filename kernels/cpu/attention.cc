// The schedule of attention over the contract's tiles and splits (contract/attention.h).
#include "kernels/cpu/attention.h"

#include <algorithm>
#include <numeric>

#include "common/base/round_up.h"
#include "kernels/contract/attention.h"
#include "kernels/contract/constants.h"
#include "kernels/contract/gradients.h"
#include "kernels/contract/row_functions.h"
#include "kernels/cpu/context.h"

namespace isobit::cpu {
namespace {

constexpr int64_t kBlockRows = 64;  // rows that share one transposition of a tile's keys
constexpr int64_t kMaxTile = 128;

// Offset of a position's first element in the cache.
int64_t CacheOffset(const PagedKv& kv, const SequenceRows& sequence, int32_t kv_head,
                    int64_t position) {
  const int64_t page = sequence.pages[position / kv.page_size];
  return ((page * kv.kv_heads + kv_head) * kv.page_size + position % kv.page_size) * kv.head_dim;
}

bool AllFinite(const Bf16* x, int64_t n) {
  bool finite = true;
  for (int64_t i = 0; i < n; ++i) finite = finite & contract::IsFinite(x[i]);
  return finite;
}

void PrepareRow(const QkvArgs& a, const SequenceRows& sequence, int64_t index,
                const RowKernels& rows) {
  const int64_t d = a.kv.head_dim;
  Bf16* row = a.qkv + (sequence.first_row + index) * a.ld;
  Bf16* k = row + a.heads * d;
  const Bf16* v = k + a.kv.kv_heads * d;
  const int64_t position = sequence.first_position + index;
  const float* cosine = a.cosine + position * (d / 2);
  const float* sine = a.sine + position * (d / 2);
  PrepareHeads(rows, a.heads, d, a.q_norm, a.eps, cosine, sine, row);
  PrepareHeads(rows, a.kv.kv_heads, d, a.k_norm, a.eps, cosine, sine, k);
  for (int32_t h = 0; h < a.kv.kv_heads; ++h) {
    const int64_t offset = CacheOffset(a.kv, sequence, h, position);
    std::copy_n(k + h * d, d, a.kv.k + offset);
    std::copy_n(v + h * d, d, a.kv.v + offset);
    PoisonHead(d, a.kv.k + offset, a.kv.v + offset);
  }
}

}  // namespace

void PrepareHeads(const RowKernels& rows, int64_t count, int64_t head_dim, const Bf16* weight,
                  float eps, const float* cosine, const float* sine, Bf16* heads) {
  for (int64_t h = 0; h < count; ++h) {
    Bf16* head = heads + h * head_dim;
    if (weight != nullptr) {
      const float inverse =
          contract::InverseRms(rows.sum_of_squares(head, head_dim), head_dim, eps);
      rows.normalise(head, inverse, weight, head, head_dim);
    }
    rows.rotate(head, head + head_dim / 2, cosine, sine, head_dim / 2);
  }
}

void PoisonHead(int64_t head_dim, Bf16* k, Bf16* v) {
  if (AllFinite(v, head_dim)) return;
  std::fill_n(k, head_dim, contract::kPoisonedKey);
  std::fill_n(v, head_dim, Bf16{0});
}

absl::Status Run(const QkvArgs& args, Context& context) {
  for (const SequenceRows& sequence : args.sequences.host) {
    context.pool.ParallelFor(sequence.num_rows, 16, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) PrepareRow(args, sequence, i, context.rows);
    });
  }
  return absl::OkStatus();
}

// Shapes that every block of one call shares.
struct AttentionOp::Sizes {
  int64_t heads_per_kv;  // query heads of one KV head
  int64_t tile;          // keys
  int64_t k_dim;         // head_dim padded to whole k16 steps
  int64_t v_dim;         // head_dim padded to whole panels
  int64_t tokens;        // of a block, at most
};

// One worker's buffers, for blocks of `rows` rows.
struct AttentionOp::Scratch {
  std::vector<Bf16> q;        // [rows][k_dim]
  std::vector<Bf16> keys;     // [tile / 32] panels [k_dim][32]
  std::vector<Bf16> values;   // [tile][v_dim]
  std::vector<Bf16> zeros;    // [k_dim], in place of a missing key
  std::vector<float> scores;  // [rows][tile]
  std::vector<Bf16> weights;  // [rows][tile]
  std::vector<float> acc;     // [rows][v_dim], of the present split
  std::vector<float> total;   // [rows][v_dim], of the splits folded so far
  std::vector<contract::SoftmaxRow> softmax;
  std::vector<contract::SplitSum> sums;
  std::vector<ExponentRange> value_ranges;

  void Resize(const Sizes& s) {
    const auto rows = static_cast<size_t>(s.tokens * s.heads_per_kv);
    const auto tile = static_cast<size_t>(s.tile);
    const auto k_dim = static_cast<size_t>(s.k_dim);
    const auto v_dim = static_cast<size_t>(s.v_dim);
    q.resize(rows * k_dim);
    keys.resize(tile * k_dim);
    values.resize(tile * v_dim);
    zeros.assign(k_dim, 0);
    scores.resize(rows * tile);
    weights.resize(rows * tile);
    acc.resize(rows * v_dim);
    total.resize(rows * v_dim);
    softmax.resize(rows);
    sums.resize(rows);
    value_ranges.resize(v_dim / kPanelColumns);
  }
};

AttentionOp::AttentionOp(MmaPanelsFn mma, const RowKernels& rows, ThreadPool& pool)
    : mma_(mma), rows_(rows), pool_(pool), scratch_(static_cast<size_t>(pool.num_threads())) {}

AttentionOp::~AttentionOp() = default;

void AttentionOp::Run(const AttentionArgs& args, float* log_sums, int64_t ld) {
  if (args.heads == 0) return;
  Sizes sizes;
  sizes.heads_per_kv = args.heads / args.kv.kv_heads;
  sizes.tile = contract::KvTile(args.kv.head_dim);
  sizes.k_dim = RoundUp(args.kv.head_dim, contract::kMmaK);
  sizes.v_dim = RoundUp(args.kv.head_dim, kPanelColumns);
  int64_t most_tokens = 0;
  for (const SequenceRows& s : args.sequences.host) most_tokens = std::max(most_tokens, s.num_rows);
  sizes.tokens =
      std::clamp(kBlockRows / sizes.heads_per_kv, int64_t{1}, std::max(most_tokens, int64_t{1}));

  blocks_.clear();
  for (const SequenceRows& sequence : args.sequences.host) {
    for (int32_t h = 0; h < args.kv.kv_heads; ++h) {
      for (int64_t t = 0; t < sequence.num_rows; t += sizes.tokens) {
        blocks_.push_back({&sequence, h, t, std::min(sizes.tokens, sequence.num_rows - t)});
      }
    }
  }
  for (Scratch& scratch : scratch_) scratch.Resize(sizes);
  pool_.ParallelFor(static_cast<int64_t>(blocks_.size()), 1,
                    [&](int64_t begin, int64_t end, int worker) {
                      for (int64_t i = begin; i < end; ++i) {
                        const Block& block = blocks_[static_cast<size_t>(i)];
                        Scratch& scratch = scratch_[static_cast<size_t>(worker)];
                        RunBlock(args, sizes, block, scratch);
                        if (log_sums != nullptr) WriteLogSums(sizes, block, scratch, log_sums, ld);
                      }
                    });
}

void AttentionOp::WriteLogSums(const Sizes& sizes, const Block& block, const Scratch& scratch,
                               float* log_sums, int64_t ld) const {
  const int64_t first_row = block.sequence->first_row + block.first_token;
  for (int64_t r = 0; r < block.tokens * sizes.heads_per_kv; ++r) {
    const int64_t head = block.kv_head * sizes.heads_per_kv + r % sizes.heads_per_kv;
    const contract::SplitSum& sum = scratch.sums[static_cast<size_t>(r)];
    log_sums[head * ld + first_row + r / sizes.heads_per_kv] =
        contract::LogSumExp2(sum.max, sum.sum);
  }
}

void AttentionOp::RunBlock(const AttentionArgs& args, const Sizes& sizes, const Block& block,
                           Scratch& scratch) const {
  const int64_t d = args.kv.head_dim;
  const int64_t rows = block.tokens * sizes.heads_per_kv;
  const int64_t first_row = block.sequence->first_row + block.first_token;
  const int64_t first_position = block.sequence->first_position + block.first_token;
  const int64_t end = first_position + block.tokens;  // keys that the block's last token sees
  const int64_t column = block.kv_head * sizes.heads_per_kv * d;

  for (int64_t r = 0; r < rows; ++r) {
    const Bf16* head = args.q + (first_row + r / sizes.heads_per_kv) * args.ldq + column +
                       r % sizes.heads_per_kv * d;
    Bf16* q = scratch.q.data() + r * sizes.k_dim;
    std::copy_n(head, d, q);
    std::fill(q + d, q + sizes.k_dim, Bf16{0});
  }
  std::fill_n(scratch.total.data(), rows * sizes.v_dim, 0.0f);
  std::fill_n(scratch.sums.data(), rows, contract::SplitSum{contract::kMinusInfinity, 0.0f});

  // The first key in the window of the first token: no row of the block sees tiles before it.
  const int64_t first_key =
      args.window == 0 ? 0 : std::max(int64_t{0}, first_position - args.window + 1);
  for (int64_t split = first_key / contract::kSplit * contract::kSplit; split < end;
       split += contract::kSplit) {
    std::fill_n(scratch.softmax.data(), rows, contract::SoftmaxRow{});
    std::fill_n(scratch.acc.data(), rows * sizes.v_dim, 0.0f);
    const int64_t split_end = std::min(split + contract::kSplit, end);
    for (int64_t tile = split; tile < split_end; tile += sizes.tile) {
      if (tile + sizes.tile > first_key) RunTile(args, sizes, block, tile, scratch);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const contract::SplitSum sum =
          contract::FinishSplit(scratch.softmax[static_cast<size_t>(r)], args.scale);
      if (sum.max == contract::kMinusInfinity) continue;  // the row sees no key of this split
      const contract::FoldFactors factors =
          contract::Fold(scratch.sums[static_cast<size_t>(r)], sum);
      rows_.fold(scratch.total.data() + r * sizes.v_dim, scratch.acc.data() + r * sizes.v_dim,
                 factors, d);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const float inverse = contract::Div(1.0f, scratch.sums[static_cast<size_t>(r)].sum);
    Bf16* out = args.out + (first_row + r / sizes.heads_per_kv) * args.ldo + column +
                r % sizes.heads_per_kv * d;
    rows_.scale_to_bf16(scratch.total.data() + r * sizes.v_dim, inverse, out, d);
  }
}

void AttentionOp::RunTile(const AttentionArgs& args, const Sizes& sizes, const Block& block,
                          int64_t begin, Scratch& scratch) const {
  const PagedKv& kv = args.kv;
  const int64_t d = kv.head_dim;
  const int64_t tile = sizes.tile;
  const int64_t first_position = block.sequence->first_position + block.first_token;

  // A row at position p sees keys [p - window + 1, p]: the tokens that see any of the tile are
  // consecutive.
  const int64_t first_token = std::max(int64_t{0}, begin - first_position);
  const int64_t end_token =
      args.window == 0
          ? block.tokens
          : std::clamp(begin + tile - 1 + args.window - first_position, int64_t{0}, block.tokens);
  if (first_token >= end_token) return;
  const int64_t first_row = first_token * sizes.heads_per_kv;
  const int64_t rows = (end_token - first_token) * sizes.heads_per_kv;
  const int64_t last_position = first_position + end_token - 1;
  // Keys of the tile that any of these rows sees; no later one is read.
  const int64_t keys = std::min(tile, last_position + 1 - begin);

  const int64_t key_panels = RoundUp(keys, kPanelColumns) / kPanelColumns;
  const int64_t key_steps_end = RoundUp(keys, contract::kMmaK);
  const Bf16* key_rows[kMaxTile];
  std::fill(key_rows + keys, key_rows + key_panels * kPanelColumns, scratch.zeros.data());
  for (int64_t j = 0; j < keys;) {  // page by page
    const int64_t slots = kv.page_size - (begin + j) % kv.page_size;
    const int64_t stop = std::min(keys, j + slots);
    int64_t offset = CacheOffset(kv, *block.sequence, block.kv_head, begin + j);
    for (; j < stop; ++j, offset += d) {
      Bf16* value = scratch.values.data() + j * sizes.v_dim;
      key_rows[j] = kv.k + offset;
      std::copy_n(kv.v + offset, d, value);
      std::fill(value + d, value + sizes.v_dim, Bf16{0});
    }
  }
  std::fill(scratch.values.data() + keys * sizes.v_dim,
            scratch.values.data() + key_steps_end * sizes.v_dim, Bf16{0});
  ExponentRange key_ranges[kMaxTile / kPanelColumns];
  for (int64_t p = 0; p < key_panels; ++p) {
    Bf16* panel = scratch.keys.data() + p * sizes.k_dim * kPanelColumns;
    rows_.transpose_keys(key_rows + p * kPanelColumns, d, sizes.k_dim, panel);
    key_ranges[p] = rows_.scan_exponents(panel, sizes.k_dim * kPanelColumns);
  }
  const int64_t value_panels = sizes.v_dim / kPanelColumns;
  std::fill(scratch.value_ranges.begin(), scratch.value_ranges.end(),
            rows_.scan_exponents(scratch.values.data(), key_steps_end * sizes.v_dim));

  float* scores = scratch.scores.data();
  Bf16* weights = scratch.weights.data();
  float* acc = scratch.acc.data() + first_row * sizes.v_dim;
  std::fill_n(scores, rows * tile, 0.0f);
  mma_({.w = {.data = scratch.keys.data(),
              .panel_stride = sizes.k_dim * kPanelColumns,
              .k_stride = kPanelColumns,
              .ranges = key_ranges},
        .panels = key_panels,
        .x = scratch.q.data() + first_row * sizes.k_dim,
        .ldx = sizes.k_dim,
        .rows = rows,
        .k = sizes.k_dim,
        .c = scores,
        .ldc = tile});
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t position = first_position + first_token + r / sizes.heads_per_kv;
    const int64_t seen_end = std::min(tile, position + 1 - begin);
    const int64_t seen_begin =
        args.window == 0 ? 0 : std::max(int64_t{0}, position - args.window + 1 - begin);
    const float alpha = rows_.update_softmax(
        &scratch.softmax[static_cast<size_t>(first_row + r)], scores + r * tile,
        static_cast<int>(seen_begin), static_cast<int>(seen_end), static_cast<int>(tile),
        args.scale, weights + r * tile, static_cast<int>(key_steps_end));
    rows_.scale(acc + r * sizes.v_dim, alpha, sizes.v_dim);
  }
  // Every row takes at least one step here: multiplying by alpha may leave -0, and the step makes
  // it +0, as in the contract. Further steps with only +0 weights change no bit and are left out.
  mma_({.w = {.data = scratch.values.data(),
              .panel_stride = kPanelColumns,
              .k_stride = sizes.v_dim,
              .ranges = scratch.value_ranges.data()},
        .panels = value_panels,
        .x = weights,
        .ldx = tile,
        .rows = rows,
        .k = key_steps_end,
        .c = acc,
        .ldc = sizes.v_dim});
}

absl::Status Run(const AttentionArgs& a, Context& context) {
  context.attention.Run(a);
  return absl::OkStatus();
}

// k and v are a cache with pages of one position, whose numbers are the rows.
absl::Status Run(const TrainingAttentionArgs& a, Context& context) {
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
  context.attention.Run(
      {.q = a.q,
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

}  // namespace isobit::cpu
