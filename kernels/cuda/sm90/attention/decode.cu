// Launches of the decode schedule, and the kernel that folds the splits.
#include <algorithm>
#include <bit>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "common/base/round_up.h"
#include "common/base/status_macros.h"
#include "kernels/cuda/common/device/async_copy.cuh"
#include "kernels/cuda/common/device/card.h"
#include "kernels/cuda/sm90/attention/decode.cuh"
#include "kernels/cuda/sm90/attention/decode.h"
#include "kernels/cuda/sm90/attention/decode_cluster.h"
#include "kernels/cuda/sm90/device/tensor_map.h"
#include "kernels/ops/attention.h"
#include "kernels/ops/paged_kv.h"

namespace isobit::cuda {
namespace {

constexpr int kMaxFoldThreads = 256;
constexpr int kFewSplits = 8;          // up to so many, FoldFew is faster
constexpr int kFoldBytes = 64 * 1024;  // of accumulators in flight, at most

// Up to so many items clusters are faster than teams, as measured: with at most kFewRowBlocks
// blocks of query rows, up to more items.
constexpr int64_t kMostItems = 48;
constexpr int64_t kFewRowBlocks = 2;
constexpr int64_t kMostItemsOfFewRowBlocks = 160;

// Thread t holds column t.
__device__ __forceinline__ void StoreFolded(float total, float sum, int32_t head_dim, Bf16* out) {
  if (static_cast<int32_t>(threadIdx.x) >= head_dim) return;
  out[threadIdx.x] = contract::FloatToBf16(contract::Mul(total, contract::Div(1.0f, sum)));
}

// Each thread folds one column on its own. For few splits that takes less time than sharing the
// factors.
__device__ __forceinline__ void FoldFew(const contract::SplitSum* sums, const float* acc,
                                        int32_t acc_stride, int32_t splits, int32_t head_dim,
                                        Bf16* out) {
  constexpr int kAtOnce = 4;
  const int column = min(static_cast<int>(threadIdx.x), head_dim - 1);
  contract::SplitSum folded = {contract::kMinusInfinity, 0.0f};
  float total = 0.0f;
#pragma unroll 1
  for (int32_t begin = 0; begin < splits; begin += kAtOnce) {
    contract::SplitSum sum[kAtOnce];
    float value[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int32_t split = min(begin + i, splits - 1);
      sum[i] = sums[split];
      value[i] = acc[split * acc_stride + column];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (begin + i >= splits || sum[i].max == contract::kMinusInfinity) continue;
      const contract::FoldFactors factors = contract::Fold(folded, sum[i]);
      total = contract::FoldAccumulator(total, value[i], factors);
    }
  }
  StoreFolded(total, folded.sum, head_dim, out);
}

// The whole block folds, one column to a thread, `chunk` splits at a time: at most as many as the
// block has threads.
__device__ __forceinline__ void FoldMany(const contract::SplitSum* sums, const float* acc,
                                         int32_t acc_stride, int32_t splits, int32_t head_dim,
                                         Bf16* out, int32_t chunk) {
  struct Step {
    contract::FoldFactors factors;
    float sum;
    bool skipped;
  };
  extern __shared__ float4 copied_units[];  // accumulators [chunk][acc_stride]
  __shared__ Step steps[kMaxFoldThreads];
  __shared__ float warp_max[kMaxFoldThreads / 32];
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const float* const copied = reinterpret_cast<const float*>(copied_units);
  const int column = min(thread, head_dim - 1);
  float before = contract::kMinusInfinity;  // the maximum of the splits folded so far
  float sum = 0.0f;
  float total = 0.0f;
  for (int32_t begin = 0; begin < splits; begin += chunk) {
    const int32_t count = min(splits - begin, chunk);
    for (int i = 4 * thread; i < count * acc_stride; i += 4 * threads) {
      CopyUnit(SharedAddress(copied + i), acc + int64_t{begin} * acc_stride + i);
    }
    // Maxima may be taken in any order, so the factors of many splits are computed at once.
    contract::SplitSum mine = {contract::kMinusInfinity, 0.0f};
    if (thread < count) mine = sums[begin + thread];
    float running = mine.max;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, running, offset);
      if (thread % 32 >= offset) running = contract::Max(running, other);
    }
    float left = __shfl_up_sync(0xffffffffu, running, 1);
    if (thread % 32 == 0) left = contract::kMinusInfinity;
    if (thread % 32 == 31) warp_max[thread / 32] = running;
    __syncthreads();
    left = contract::Max(left, before);
    for (int w = 0; w < threads / 32; ++w) {
      if (w < thread / 32) left = contract::Max(left, warp_max[w]);
      before = contract::Max(before, warp_max[w]);
    }
    contract::SplitSum so_far = {left, 0.0f};
    steps[thread] = {contract::Fold(so_far, mine), mine.sum, mine.max == contract::kMinusInfinity};
    WaitForUnits();
    __syncthreads();

#pragma unroll 8
    for (int32_t i = 0; i < count; ++i) {
      const Step& step = steps[i];
      const float value = copied[i * acc_stride + column];
      const float next_sum = contract::FoldAccumulator(sum, step.sum, step.factors);
      const float next_total = contract::FoldAccumulator(total, value, step.factors);
      sum = step.skipped ? sum : next_sum;
      total = step.skipped ? total : next_total;
    }
    __syncthreads();  // before the next chunk's copies and steps
  }
  StoreFolded(total, sum, head_dim, out);
}

// The sequence and token of a block of FoldKernel's grid; sequence -1: there is none.
struct FoldedRow {
  int32_t sequence;
  int32_t token;

  static __device__ __forceinline__ FoldedRow Of(const DecodeParams& p, int32_t block) {
    if (!p.by_row) return {p.first_sequence + block / p.max_tokens, block % p.max_tokens};
    const int32_t sequence = p.sequences.sequence_of_row[block];
    const int32_t listed = sequence - p.first_sequence;
    if (sequence < 0 || listed < 0 || listed >= p.num_listed) return {-1, 0};
    return {sequence, block - p.sequences.first_row[sequence]};
  }
};

// Folds the splits of one row and head, left to right.
__global__ void __launch_bounds__(kMaxFoldThreads)
    FoldKernel(const __grid_constant__ DecodeParams p, int32_t chunk) {
  ReleaseSuccessor();
  const auto [sequence, token] = FoldedRow::Of(p, static_cast<int32_t>(blockIdx.x));
  if (sequence < 0) {
    WaitForPredecessor();
    return;
  }
  const int32_t head = static_cast<int32_t>(blockIdx.y);
  const int32_t first_row = p.sequences.first_row[sequence];
  const int32_t tokens = p.sequences.first_row[sequence + 1] - first_row;
  const SplitRange range = SplitsOf(p, p.sequences.first_position[sequence], tokens);
  const int32_t splits = range.end - range.first;
  const int64_t first = SplitIndex(p, sequence, first_row, token, head, 0);
  const contract::SplitSum* const sums = p.split_sums + first;
  const float* const acc = p.split_acc + first * p.acc_stride;
  const int32_t head_dim = p.kv.head_dim;
  Bf16* const out = p.out + (first_row + token) * p.ldo + int64_t{head} * head_dim;
  WaitForPredecessor();
  if (token >= tokens || tokens > p.max_tokens) return;
  if (splits == 1) return;  // the kernel before has written the row
  if (splits <= kFewSplits) {
    FoldFew(sums, acc, p.acc_stride, splits, head_dim, out);
  } else {
    FoldMany(sums, acc, p.acc_stride, splits, head_dim, out, chunk);
  }
}

// Floats from one accumulator to the next: whole units of 16 bytes.
int32_t AccStride(int32_t head_dim) { return RoundUp(head_dim, 4); }

// Splits that the keys of a sequence of at most max_tokens rows can touch.
int64_t MaxSplits(const AttentionArgs& args, const DeviceSequences& sequences, int32_t max_tokens) {
  const int64_t all = CeilDiv(int64_t{sequences.max_positions}, contract::kSplit);
  if (args.window == 0 || args.window >= sequences.max_positions) return all;
  const int64_t keys = args.window + max_tokens - 1;
  return std::min(all, (keys + 2 * contract::kSplit - 2) / contract::kSplit);
}

// Rows that have results, or room for them: by sequence and token, or by row of the batch where
// that is less. Steps with padding, and with guesses for some, have far fewer rows.
int64_t ResultRows(const DeviceSequences& sequences, int32_t max_tokens) {
  return std::min(int64_t{sequences.num_sequences} * max_tokens, int64_t{sequences.num_rows});
}

int64_t MaxSplitResults(const AttentionArgs& args, const DeviceSequences& sequences,
                        int32_t max_tokens) {
  const int64_t splits = MaxSplits(args, sequences, max_tokens);
  if (splits <= 1) return 0;
  return ResultRows(sequences, max_tokens) * args.heads * splits;
}

bool WholeUnits(const PagedKv& kv) {
  return Mappable(kv.k, kv.head_dim) && Mappable(kv.v, kv.head_dim);
}

// Blocks of query rows, of at least 8, of all KV heads and sequences.
int64_t RowBlocks(const AttentionArgs& args, const DeviceSequences& sequences, int32_t max_tokens) {
  const int64_t rows = int64_t{max_tokens} * (args.heads / args.kv.kv_heads);
  return int64_t{sequences.num_sequences} * args.kv.kv_heads * CeilDiv(rows, 8);
}

// Whether the sequences' bounds let groups share splits: members have one row each, and no window
// hides an early key from any of them.
bool CanShare(const AttentionArgs& args, const DeviceSequences& sequences, int32_t max_tokens) {
  const bool sees_all = args.window == 0 || args.window >= sequences.max_positions;
  return sequences.shares && max_tokens == 1 && sees_all;
}

size_t SumBytes(int64_t results) {
  return static_cast<size_t>(RoundUp(results * int64_t{sizeof(contract::SplitSum)}, 256));
}

// Blocks of the grid that works through a list of at most `items` items.
int64_t BlocksFor(int64_t items, const Card& card) { return std::min(card.multiprocessors, items); }

template <typename Shape>
absl::Status LaunchShape(const DecodeParams& params, int64_t blocks, const Stream& stream) {
  return Launch(DecodeKernel<Shape>,
                {.blocks = dim3(static_cast<unsigned>(blocks)),
                 .threads = dim3(kDecodeThreads),
                 .shared_bytes = Shape::kSharedBytes},
                stream, params);
}

// Computes the splits that sequences share once. Blocks of 16 rows where registers suffice, also
// for a sequence's own splits: memory is slower than the products.
absl::Status LaunchSharing(const DecodeParams& p, int64_t blocks, const Stream& stream) {
  if (p.kv.head_dim > 128) return LaunchShape<DecodeShape<256, 1, false, true>>(p, blocks, stream);
  if (p.kv.head_dim > 64) return LaunchShape<DecodeShape<128, 2, false, true>>(p, blocks, stream);
  return LaunchShape<DecodeShape<64, 2, false, true>>(p, blocks, stream);
}

template <bool kWalk>
absl::Status LaunchDim(const DecodeParams& p, int64_t blocks, const Stream& stream) {
  const bool narrow = !kWalk && int64_t{p.max_tokens} * p.heads_per_kv <= 8;
  if (p.kv.head_dim > 128) return LaunchShape<DecodeShape<256, 1, kWalk>>(p, blocks, stream);
  if (p.kv.head_dim > 64) {
    if (narrow) return LaunchShape<DecodeShape<128, 1, false>>(p, blocks, stream);
    return LaunchShape<DecodeShape<128, 2, kWalk>>(p, blocks, stream);
  }
  if (narrow) return LaunchShape<DecodeShape<64, 1, false>>(p, blocks, stream);
  return LaunchShape<DecodeShape<64, 2, kWalk>>(p, blocks, stream);
}

absl::Status LaunchSchedule(const DecodeSchedule& schedule, const DecodeParams& params,
                            int64_t blocks, const Stream& stream) {
  switch (schedule.kind) {
    case DecodeSchedule::kTeams:
      return LaunchDim<false>(params, blocks, stream);
    case DecodeSchedule::kSharingTeams:
      return LaunchSharing(params, blocks, stream);
    case DecodeSchedule::kClusters:
      return LaunchDecodeClusters(params, schedule.clusters, stream);
  }
  return absl::InternalError("no such schedule");
}

absl::StatusOr<DecodeParams> MakeParams(const AttentionArgs& args, const DeviceSequences& sequences,
                                        int32_t min_tokens, int32_t max_tokens) {
  DecodeParams p = {};
  p.sequences = sequences;
  p.min_tokens = std::max(min_tokens, 1);
  p.max_tokens = max_tokens;
  p.one_token = max_tokens == 1;
  p.q = args.q;
  p.ldq = args.ldq;
  p.aligned_q = reinterpret_cast<uintptr_t>(args.q) % 4 == 0 && args.ldq % 2 == 0;
  p.heads = args.heads;
  p.heads_per_kv = args.heads / args.kv.kv_heads;
  p.kv = args.kv;
  p.scale = args.scale;
  constexpr int64_t kNoWindow = (int64_t{1} << 31) - 1;
  p.window = static_cast<int32_t>(args.window == 0 ? kNoWindow : std::min(args.window, kNoWindow));
  p.acc_stride = AccStride(args.kv.head_dim);
  p.out = args.out;
  p.ldo = args.ldo;
  p.whole_units = WholeUnits(args.kv);
  const auto page_size = static_cast<uint32_t>(args.kv.page_size);
  p.page_shift = std::has_single_bit(page_size) ? std::countr_zero(page_size) : -1;
  const int32_t run = std::gcd(args.kv.page_size, KeysOfChunk(args.kv.head_dim));
  if (run >= 8 && p.whole_units) {
    constexpr int64_t kAnySlot = (int64_t{1} << 31) - 1;  // the cache's end is not known here
    const absl::StatusOr<CUtensorMap> keys =
        MapMatrix(args.kv.k, kAnySlot, args.kv.head_dim, args.kv.head_dim, run, kHalfColumns);
    if (!keys.ok()) return keys.status();
    const absl::StatusOr<CUtensorMap> values =
        MapMatrix(args.kv.v, kAnySlot, args.kv.head_dim, args.kv.head_dim, run, kHalfColumns);
    if (!values.ok()) return values.status();
    p.keys = *keys;
    p.values = *values;
    p.run = run;
  }
  return p;
}

}  // namespace

size_t DecodeWorkspaceBytes(const AttentionArgs& args, const DeviceSequences& sequences,
                            int32_t max_tokens) {
  const int64_t results = MaxSplitResults(args, sequences, max_tokens);
  return SumBytes(results) +
         static_cast<size_t>(results * AccStride(args.kv.head_dim)) * sizeof(float);
}

DecodeSchedule ChooseDecodeSchedule(const Card& card, const AttentionArgs& args,
                                    const DeviceSequences& sequences, int32_t max_tokens) {
  const int64_t row_blocks = std::max<int64_t>(RowBlocks(args, sequences, max_tokens), 1);
  const int64_t splits = std::max<int64_t>(MaxSplits(args, sequences, max_tokens), 1);
  const int64_t most = row_blocks <= kFewRowBlocks ? kMostItemsOfFewRowBlocks : kMostItems;
  if (!WholeUnits(args.kv) || row_blocks * splits > most) {
    return {CanShare(args, sequences, max_tokens) ? DecodeSchedule::kSharingTeams
                                                  : DecodeSchedule::kTeams};
  }
  // Clusters of four blocks, two blocks to a multiprocessor.
  const int64_t at_once = std::max<int64_t>(card.multiprocessors * 2 / 4 / row_blocks, 1);
  return {DecodeSchedule::kClusters, static_cast<int>(std::min(splits, at_once))};
}

absl::Status LaunchDecodeAttention(const AttentionArgs& args, const DeviceSequences& sequences,
                                   int32_t max_tokens, const AttentionWorkspace& workspace,
                                   const Stream& stream) {
  ISOBIT_ASSIGN_OR_RETURN(const Card* const card, CardOf(stream));
  return LaunchDecodeAttentionAs(ChooseDecodeSchedule(*card, args, sequences, max_tokens), args,
                                 sequences, max_tokens, workspace, stream);
}

absl::Status LaunchDecodeAttentionAs(const DecodeSchedule& schedule, const AttentionArgs& args,
                                     const DeviceSequences& sequences, int32_t max_tokens,
                                     const AttentionWorkspace& workspace, const Stream& stream) {
  if (schedule.kind == DecodeSchedule::kClusters && !WholeUnits(args.kv)) {
    return absl::InvalidArgumentError(
        absl::StrCat("decode attention by clusters: keys of head_dim ", args.kv.head_dim,
                     " are not whole, aligned 16-byte units"));
  }
  const bool shares = schedule.kind == DecodeSchedule::kSharingTeams;
  if (shares && !CanShare(args, sequences, max_tokens)) {
    return absl::InvalidArgumentError(
        absl::StrCat("decode attention that shares splits: max_tokens ", max_tokens, ", window ",
                     args.window, ", sequences.shares ", sequences.shares,
                     "; expected one token, no window below max_positions, and tables that share"));
  }
  ISOBIT_ASSIGN_OR_RETURN(const Card* const card, CardOf(stream));
  absl::StatusOr<DecodeParams> params = MakeParams(args, sequences, 1, max_tokens);
  if (!params.ok()) return params.status();
  if (shares) params->one_token = false;
  params->by_row =
      ResultRows(sequences, max_tokens) < int64_t{sequences.num_sequences} * max_tokens;
  const int64_t max_splits = MaxSplits(args, sequences, max_tokens);
  params->max_splits = static_cast<int32_t>(max_splits);
  params->split_sums = reinterpret_cast<contract::SplitSum*>(workspace.data);
  params->split_acc = reinterpret_cast<float*>(
      workspace.data + SumBytes(MaxSplitResults(args, sequences, max_tokens)));
  const int32_t listed = shares ? kSharingWindow : kMaxListed;
  for (int32_t first = 0; first < sequences.num_sequences; first += listed) {
    params->first_sequence = first;
    params->num_listed = std::min(sequences.num_sequences - first, listed);
    const int64_t blocks = CeilDiv(int64_t{max_tokens} * params->heads_per_kv, 8);
    const int64_t grid =
        BlocksFor(params->num_listed * blocks * args.kv.kv_heads * max_splits, *card);
    const absl::Status launched = LaunchSchedule(schedule, *params, grid, stream);
    if (!launched.ok()) return launched;
    if (max_splits == 1) continue;
    const int64_t threads = std::max<int64_t>(128, RoundUp(args.kv.head_dim, 32));
    const int64_t acc_bytes = params->acc_stride * int64_t{sizeof(float)};
    const int64_t chunk = std::min({threads, max_splits, kFoldBytes / acc_bytes});
    const absl::Status status = Launch(
        FoldKernel,
        {.blocks = dim3(static_cast<unsigned>(params->by_row ? sequences.num_rows
                                                             : params->num_listed * max_tokens),
                        static_cast<unsigned>(args.heads)),
         .threads = dim3(static_cast<unsigned>(threads)),
         .shared_bytes = static_cast<size_t>(chunk * acc_bytes)},
        stream, *params, chunk);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status LaunchWalkAttention(const AttentionArgs& args, const DeviceSequences& sequences,
                                 int32_t min_tokens, const Stream& stream) {
  ISOBIT_ASSIGN_OR_RETURN(const Card* const card, CardOf(stream));
  absl::StatusOr<DecodeParams> params = MakeParams(args, sequences, min_tokens, sequences.max_rows);
  if (!params.ok()) return params.status();
  for (int32_t first = 0; first < sequences.num_sequences; first += kMaxListed) {
    params->first_sequence = first;
    params->num_listed = std::min(sequences.num_sequences - first, kMaxListed);
    const int64_t blocks = CeilDiv(int64_t{sequences.max_rows} * params->heads_per_kv, 8);
    const int64_t grid = BlocksFor(params->num_listed * blocks * args.kv.kv_heads, *card);
    if (absl::Status status = LaunchDim<true>(*params, grid, stream); !status.ok()) {
      return status;
    }
  }
  return absl::OkStatus();
}

}  // namespace isobit::cuda
