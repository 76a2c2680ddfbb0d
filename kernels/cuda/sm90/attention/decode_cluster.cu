// The kernel whose clusters compute one split with four blocks, and its launcher.
//
// A split has 512 keys. Each block of the cluster loads a quarter of the keys, all their columns,
// and a quarter of the columns of all values. Its eight warps compute the scores of its keys and
// store them into every block of the cluster. Each block then has what the softmax needs and adds
// up its own columns: one warp takes 16 of them through the split's chain of products. The contract
// fixes the order of that chain, so it is the kernel's critical path.
#include <algorithm>

#include "common/base/round_up.h"
#include "kernels/contract/attention.h"
#include "kernels/contract/constants.h"
#include "kernels/cuda/common/device/async_copy.cuh"
#include "kernels/cuda/common/device/dependent_launch.cuh"
#include "kernels/cuda/common/device/mma_sync.cuh"
#include "kernels/cuda/sm90/attention/decode_cluster.h"
#include "kernels/cuda/sm90/attention/decode_load.cuh"
#include "kernels/cuda/sm90/attention/decode_softmax.cuh"
#include "kernels/cuda/sm90/attention/decode_work.cuh"
#include "kernels/cuda/sm90/attention/matrix_fragments.cuh"
#include "kernels/cuda/sm90/device/barrier.cuh"
#include "kernels/cuda/sm90/device/cluster.cuh"

namespace isobit::cuda {
namespace {

constexpr int kBlocks = 4;  // of a cluster
constexpr int kWarps = 8;   // of a block
constexpr int kThreads = 32 * kWarps;
constexpr int kKeys = contract::kSplit / kBlocks;  // a block's keys, 16 to a warp
static_assert(kKeys == 16 * kWarps);

template <int kDim_, int kColumnBlocks_>
struct ClusterShape {
  static constexpr int kDim = kDim_;                    // head_dim, padded with zeros
  static constexpr int kColumnBlocks = kColumnBlocks_;  // of 8 query rows
  static constexpr bool kShares = false;
  static constexpr int kRows = 8 * kColumnBlocks;
  static constexpr int kSteps = kDim / 16;
  static constexpr int kTile = contract::KvTile(kDim);
  static constexpr int kColumns = kDim / kBlocks;  // a block's, of the values
  static constexpr int kKeyUnits = kDim / 8;       // of 16 bytes
  static constexpr int kValueUnits = kColumns / 8;
  static constexpr int kSums = kColumns / 16 * kColumnBlocks;  // warps that add up values
  static_assert(kSums <= kWarps);
  static constexpr int kBlocksAtOnce = kDim <= 128 && kColumnBlocks == 1 ? 2 : 1;  // of an SM
};

template <typename Shape>
struct ClusterShared {
  uint4 keys[kKeys * Shape::kKeyUnits];
  uint4 values[contract::kSplit * Shape::kValueUnits];
  SplitSoftmax<Shape> softmax;
  int64_t result[Shape::kRows];     // index of the row's first split among the split results
  int64_t out[Shape::kRows];        // index of the row's column 0 in the output
  int32_t slots[contract::kSplit];  // of the cache, where the keys lie; -1: not seen
  uint64_t pushed;                  // barrier: all blocks' scores of a split have arrived
};

template <typename Shape>
class DecodeCluster {
 public:
  using Shared = ClusterShared<Shape>;

  // pages: the page numbers of the sequence.
  __device__ DecodeCluster(const DecodeParams& p, const DecodeItem& item, const int32_t* pages,
                           Shared& shared)
      : p_(p),
        item_(item),
        pages_(pages),
        shared_(shared),
        rank_(static_cast<int>(BlockInCluster())),
        thread_(static_cast<int>(threadIdx.x)),
        warp_(thread_ / 32),
        lane_(thread_ % 32) {}

  // Computes splits first, first + stride, ... below end. Finding the addresses takes long, so it
  // is done before the predecessor has ended.
  __device__ void Run(int32_t first, int32_t end, int32_t stride) {
    if (thread_ == 0) {
      InitBarrier(SharedAddress(&shared_.pushed), 1);
      FenceBarrierInit();
    }
    ArriveCluster();
    PlaceRows();
    const QueryRows<Shape> rows(p_, item_);
    uint32_t queries[Shape::kSteps][kColumnBlocks][2];
    uint32_t parity = 0;
#pragma unroll 1
    for (int32_t split = first; split < end; split += stride) {
      // Keeps the compiler from computing addresses before the loop: there are too many to keep in
      // registers, and the loop mostly runs once.
      asm volatile("" : "+r"(thread_), "+r"(warp_), "+r"(lane_), "+r"(rank_));
      FindSlots(split);
      __syncthreads();
      if (!p_.sequences.past_is_written) WaitForPredecessor();
      FetchKeys(split);
      FetchValues(split);
      const NewUnit unit = FindNew(split, thread_);
      WaitForPredecessor();
      if (split == first) rows.Load(p_, queries);
      CopyNewRows(split, unit);
      WaitForCommitGroups<1>();  // the values may still be in flight
      __syncthreads();
      float scores[kColumnBlocks][4] = {};
      Score(queries, scores);
      MaskScores<Shape>(p_, item_, Begin(split) + rank_ * kKeys + 16 * warp_, scores);
      WaitCluster();  // every block has initialised its barrier, or has finished the split before
      PushScores(scores);
      if (thread_ == 0) {
        ExpectBytes(SharedAddress(&shared_.pushed), sizeof(shared_.softmax.scores));
      }
      WaitClusterBarrier(SharedAddress(&shared_.pushed), parity);
      parity ^= 1;
#pragma unroll 1
      for (int b = 0; b < kColumnBlocks; ++b) {
        WeighRow<Shape>(p_, item_, split, warp_ + 8 * b, shared_.softmax);
      }
      WaitForCommitGroups<0>();
      __syncthreads();
      const int chain = thread_ - (kThreads - 8 * Shape::kRows);
      if (chain >= 0) AddWeights<Shape>(item_, split, chain, shared_.softmax);
      float acc[4] = {};
      if (warp_ < Shape::kSums) AddValues(split, acc);
      __syncthreads();
      if (split + stride < end) ArriveCluster();
      if (warp_ < Shape::kSums) Store(split, acc);
    }
  }

 private:
  static constexpr int kColumnBlocks = Shape::kColumnBlocks;

  __device__ static int32_t Begin(int32_t split) { return split * contract::kSplit; }
  __device__ int32_t NumSplits() const {
    return item_.sequence_splits.end - item_.sequence_splits.first;
  }

  __device__ void PlaceRows() {
    if (thread_ >= item_.rows) return;
    const int32_t token = item_.TokenOf(p_, thread_);
    const int32_t head = item_.HeadOf(p_, thread_);
    shared_.result[thread_] = SplitIndex(p_, item_.sequence, item_.first_row, token, head, 0);
    shared_.out[thread_] = (item_.first_row + token) * p_.ldo + int64_t{head} * p_.kv.head_dim;
  }

  // ---- Keys and values into shared memory

  // Where unit `unit` of a row lies. In consecutive rows it lies in different banks.
  __device__ static uint4* KeyUnit(Shared& shared, int key, int unit) {
    return &shared.keys[key * Shape::kKeyUnits + (unit ^ (key % 8))];
  }
  __device__ static uint4* ValueUnit(Shared& shared, int key, int unit) {
    constexpr int kKeysOfLine = 8 / Shape::kValueUnits;  // of 128 bytes
    return &shared.values[key * Shape::kValueUnits +
                          (unit ^ (key / kKeysOfLine % Shape::kValueUnits))];
  }

  __device__ void FindSlots(int32_t split) {
    constexpr int kEach = contract::kSplit / kThreads;
    int32_t page[kEach];
    int32_t offset[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int32_t position = Begin(split) + i * kThreads + thread_;
      const bool seen = position >= item_.first_key && position < item_.end_key;
      const int32_t index = position / p_.kv.page_size;
      offset[i] = position - index * p_.kv.page_size;
      page[i] = seen ? pages_[index] : -1;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int32_t slot = (page[i] * p_.kv.kv_heads + item_.kv_head) * p_.kv.page_size + offset[i];
      shared_.slots[i * kThreads + thread_] = page[i] < 0 ? -1 : slot;
    }
  }

  __device__ void FetchKeys(int32_t split) {
    const int unit = thread_ % Shape::kKeyUnits;
    const bool inside = 8 * unit < p_.kv.head_dim;
    constexpr int kAtOnce = kThreads / Shape::kKeyUnits;  // keys
#pragma unroll
    for (int i = 0; i < kKeys / kAtOnce; ++i) {
      const int key = i * kAtOnce + thread_ / Shape::kKeyUnits;
      Fetch(split, rank_ * kKeys + key, inside, KeyUnit(shared_, key, unit), p_.kv.k + 8 * unit);
    }
    CommitUnits();
  }

  __device__ void FetchValues(int32_t split) {
    const int unit = thread_ % Shape::kValueUnits;
    const int column = rank_ * Shape::kColumns + 8 * unit;
    const bool inside = column < p_.kv.head_dim;
    constexpr int kAtOnce = kThreads / Shape::kValueUnits;  // keys
#pragma unroll
    for (int i = 0; i < contract::kSplit / kAtOnce; ++i) {
      const int key = i * kAtOnce + thread_ / Shape::kValueUnits;
      Fetch(split, key, inside, ValueUnit(shared_, key, unit), p_.kv.v + column);
    }
    CommitUnits();
  }

  // Positions that no row sees read as +0. This step's positions are left to CopyNewRows; all
  // others can be read before the predecessor has ended (device_sequences.h).
  __device__ void Fetch(int32_t split, int key, bool inside, uint4* to, const Bf16* column) {
    const int32_t slot = shared_.slots[key];
    if (slot >= 0 && Begin(split) + key >= item_.first_position) return;  // new
    const bool real = slot >= 0 && inside;
    CopyUnitOrZero(SharedAddress(to), real ? column + int64_t{slot} * p_.kv.head_dim : p_.kv.k,
                   real);
  }

  // One of the 16-byte units that the block needs of this step's positions in a split.
  struct NewUnit {
    uint4* to = nullptr;          // null: none
    const uint4* from = nullptr;  // null: +0
  };
  static constexpr int kNewUnits = Shape::kKeyUnits + Shape::kValueUnits;  // of a position
  __device__ int32_t FirstNew(int32_t split) const {
    return max(item_.first_position - Begin(split), 0);
  }
  __device__ int32_t EndNew(int32_t split) const {
    return min(item_.end_key - Begin(split), contract::kSplit);
  }
  __device__ NewUnit FindNew(int32_t split, int32_t index) {
    const int32_t position = FirstNew(split) + index / kNewUnits;
    if (position >= EndNew(split)) return {};
    const int unit = index % kNewUnits;
    const int value_unit = unit - Shape::kKeyUnits;
    const bool is_key = value_unit < 0;
    const int key = position - rank_ * kKeys;
    if (is_key && (key < 0 || key >= kKeys)) return {};
    const int column = is_key ? 8 * unit : rank_ * Shape::kColumns + 8 * value_unit;
    const int32_t slot = shared_.slots[position];
    NewUnit found;
    found.to = is_key ? KeyUnit(shared_, key, unit) : ValueUnit(shared_, position, value_unit);
    if (slot >= 0 && column < p_.kv.head_dim) {
      found.from = reinterpret_cast<const uint4*>((is_key ? p_.kv.k : p_.kv.v) +
                                                  int64_t{slot} * p_.kv.head_dim + column);
    }
    return found;
  }

  // unit: FindNew's answer for this thread's first unit.
  __device__ void CopyNewRows(int32_t split, NewUnit unit) {
    const int32_t count = (EndNew(split) - FirstNew(split)) * kNewUnits;
#pragma unroll 1
    for (int32_t i = thread_; i < count; i += kThreads) {
      if (i != thread_) unit = FindNew(split, i);
      if (unit.to != nullptr) *unit.to = unit.from != nullptr ? *unit.from : uint4{};
    }
  }

  // ---- Scores, and products with the values

  // Lane (g, q) gets keys g and g + 8 of the warp's against rows 2q and 2q + 1 of each 8.
  __device__ void Score(const uint32_t (&queries)[Shape::kSteps][kColumnBlocks][2],
                        float (&scores)[kColumnBlocks][4]) {
#pragma unroll
    for (int step = 0; step < Shape::kSteps; ++step) {
      uint32_t keys[4];
      LoadMatrices(keys,
                   SharedAddress(KeyUnit(shared_, 16 * warp_ + lane_ % 16, 2 * step + lane_ / 16)));
#pragma unroll
      for (int b = 0; b < kColumnBlocks; ++b) MmaSync(scores[b], keys, queries[step][b]);
    }
  }

  __device__ void PushScores(const float (&scores)[kColumnBlocks][4]) {
#pragma unroll
    for (int b = 0; b < kColumnBlocks; ++b) {
      const int key = rank_ * kKeys + 16 * warp_ + lane_ / 4;
      const float* to = &shared_.softmax.scores[ScoreIndex<Shape>(8 * b + lane_ % 4 * 2, key)];
      const float(&s)[4] = scores[b];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        StoreToBlock(AddressInBlock(SharedAddress(to), block), s[0], s[1], s[2], s[3],
                     AddressInBlock(SharedAddress(&shared_.pushed), block));
      }
    }
  }

  // Warp w computes 8 rows (FirstRow) and 16 of the block's columns (FirstColumn). Lane (g, q) gets
  // columns g and g + 8 of rows 2q and 2q + 1.
  __device__ void AddValues(int32_t split, float (&acc)[4]) {
    const TileRange tiles = TilesOf<Shape>(item_, split);
    // The swizzle depends on key % 8 alone, so steps of 16 keys are equally far apart.
    const uint32_t base = SharedAddress(
        ValueUnit(shared_, lane_ / 16 * 8 + lane_ % 8, FirstColumn() / 8 + lane_ / 8 % 2));
#pragma unroll 1
    for (int t = tiles.first; t < tiles.end; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        acc[e] =
            contract::Mul(acc[e], shared_.softmax.alpha[FirstRow() + lane_ % 4 * 2 + e % 2][t]);
      }
#pragma unroll
      for (int step = 0; step < Shape::kTile / 16; ++step) {
        const int key = t * Shape::kTile + 16 * step;
        uint32_t values[4];
        LoadTransposed(values, base + static_cast<uint32_t>(key * Shape::kValueUnits) * 16);
        uint32_t weights[2];
        LoadWeights(shared_.softmax, FirstRow(), key, weights);
        MmaSync(acc, values, weights);
      }
    }
  }
  __device__ int FirstRow() const { return warp_ % kColumnBlocks * 8; }
  __device__ int FirstColumn() const { return warp_ / kColumnBlocks * 16; }

  // Stores the split's results, or the output if the sequence has no other split.
  __device__ void Store(int32_t split, const float (&acc)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = FirstRow() + lane_ % 4 * 2 + i;
      if (row >= item_.rows) continue;
      const contract::SplitSum sum = shared_.softmax.sums[row];
      const int64_t index = shared_.result[row] + split - item_.sequence_splits.first;
      const bool only = NumSplits() == 1;
      if (!only && rank_ == 0 && FirstColumn() == 0 && lane_ / 4 == 0) {
        p_.split_sums[index] = sum;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t column = rank_ * Shape::kColumns + FirstColumn() + 8 * half + lane_ / 4;
        if (only) {
          if (column < p_.kv.head_dim) {
            p_.out[shared_.out[row] + column] = OutputOfOnly(sum, acc[2 * half + i]);
          }
        } else if (column < p_.acc_stride) {
          p_.split_acc[index * p_.acc_stride + column] = acc[2 * half + i];
        }
      }
    }
  }

  const DecodeParams& p_;
  const DecodeItem& item_;
  const int32_t* pages_;
  Shared& shared_;
  int rank_;
  int thread_;
  int warp_;
  int lane_;
};

// Grid: (blocks of the clusters of a block of rows, KV heads x blocks of rows, listed sequences).
template <typename Shape>
__global__ void __launch_bounds__(kThreads, Shape::kBlocksAtOnce)
    DecodeClusterKernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ uint4 raw[];
  ReleaseSuccessor();
  const auto cluster = static_cast<int32_t>(blockIdx.x) / kBlocks;
  const auto clusters = static_cast<int32_t>(gridDim.x) / kBlocks;
  const auto block = static_cast<int32_t>(blockIdx.y) / p.kv.kv_heads;
  DecodeItem item;
  item.sequence = p.first_sequence + static_cast<int32_t>(blockIdx.z);
  // The tables came with a copy before the step's first kernel, not from the predecessor.
  item.first_row = p.sequences.first_row[item.sequence];
  item.first_position = p.sequences.first_position[item.sequence];
  const int32_t tokens = p.sequences.first_row[item.sequence + 1] - item.first_row;
  const int32_t* pages = p.sequences.pages + p.sequences.first_page[item.sequence];
  item.sequence_splits = SplitsOf(p, item.first_position, tokens);
  const int32_t first = item.sequence_splits.first + cluster;
  if (tokens < p.min_tokens || tokens > p.max_tokens ||
      block * Shape::kRows >= tokens * p.heads_per_kv || first >= item.sequence_splits.end) {
    WaitForPredecessor();
    return;
  }
  item.SetRows<Shape>(p, tokens, static_cast<int32_t>(blockIdx.y) % p.kv.kv_heads, block);
  DecodeCluster<Shape>(p, item, pages, *reinterpret_cast<ClusterShared<Shape>*>(raw))
      .Run(first, item.sequence_splits.end, clusters);
}

template <int kDim, int kColumnBlocks>
absl::Status LaunchShape(const DecodeParams& p, int clusters, const Stream& stream) {
  using Shape = ClusterShape<kDim, kColumnBlocks>;
  const int32_t blocks = CeilDiv(p.max_tokens * p.heads_per_kv, Shape::kRows);
  return Launch(DecodeClusterKernel<Shape>,
                {.blocks = dim3(static_cast<unsigned>(clusters * kBlocks),
                                static_cast<unsigned>(p.kv.kv_heads * blocks),
                                static_cast<unsigned>(p.num_listed)),
                 .threads = dim3(kThreads),
                 .shared_bytes = sizeof(ClusterShared<Shape>),
                 .cluster = kBlocks},
                stream, p);
}

template <int kDim>
absl::Status LaunchDim(const DecodeParams& p, int clusters, const Stream& stream) {
  if (int64_t{p.max_tokens} * p.heads_per_kv <= 8) return LaunchShape<kDim, 1>(p, clusters, stream);
  return LaunchShape<kDim, 2>(p, clusters, stream);
}

}  // namespace

absl::Status LaunchDecodeClusters(const DecodeParams& params, int clusters, const Stream& stream) {
  if (params.kv.head_dim > 128) return LaunchDim<256>(params, clusters, stream);
  if (params.kv.head_dim > 64) return LaunchDim<128>(params, clusters, stream);
  return LaunchDim<64>(params, clusters, stream);
}

}  // namespace isobit::cuda
