// The order of a row's tokens (C8), with the row's 8 ranges in the shared memory of a cluster's
// blocks: where a prefix of a given size or weight ends, and which tokens come first. Only short
// lists are sorted: histograms narrow an interval of keys until it has few tokens.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LOG_PROBS_ROW_ORDER_CUH_
#define ISOBIT_KERNELS_CUDA_SM90_LOG_PROBS_ROW_ORDER_CUH_

#include <cooperative_groups.h>

#include <cstdint>

#include "kernels/cuda/sm90/log_probs/vocab_range.cuh"

namespace isobit::cuda {

inline constexpr int kBins = kRangeThreads;
inline constexpr int kShortList = 512;  // with so few keys in an interval, all pairs are compared

// One block's share of what the cluster's blocks read from each other. Other blocks may read counts
// and masses from JoinBins on, and the list from Gather on, until the next Sync; until then they
// must not be overwritten.
struct OrderScratch {
  uint32_t counts[kBins];  // of this range
  uint32_t mass_low[kBins];
  uint32_t mass_high[kBins];
  uint64_t row_mass[kBins];  // of all ranges
  uint32_t row_counts[kBins];
  uint64_t list[kMaxTopLogProbs];      // keys of this range
  uint64_t gathered[kMaxTopLogProbs];  // keys of all ranges
  uint64_t masses[kShortList];
  uint64_t inboxes[2][contract::kLeaves];  // one word from every block; a double buffer
  uint32_t list_size;
  uint32_t bin;
  uint64_t before;  // the mass of the bins before `bin`
  uint64_t last;
};

// The exchange of data between a row's blocks. All threads of all blocks call the members together.
class RowCluster {
 public:
  __device__ RowCluster() : cluster_(cooperative_groups::this_cluster()) {}

  __device__ int rank() const { return static_cast<int>(cluster_.block_rank()); }
  // Makes what the blocks have written to shared memory visible to each other.
  __device__ void Sync() { cluster_.sync(); }
  template <typename T>
  __device__ T* Of(int rank, T* shared) {
    return cluster_.map_shared_rank(shared, static_cast<unsigned>(rank));
  }
  // Tells the other blocks that this block runs. AwaitAll must follow; until then no other block's
  // memory may be accessed.
  __device__ void Arrive() { cluster_.barrier_arrive(); }
  __device__ void AwaitAll() { cluster_.barrier_wait(); }
  // Returns every block's word. The array is valid until the second Exchange after this one.
  __device__ const uint64_t* Exchange(uint64_t word, OrderScratch& scratch) {
    turn_ = 1 - turn_;
    if (threadIdx.x < contract::kLeaves) {
      Of(static_cast<int>(threadIdx.x), scratch.inboxes[turn_])[rank()] = word;
    }
    Sync();
    return scratch.inboxes[turn_];
  }

 private:
  cooperative_groups::cluster_group cluster_;
  int turn_ = 0;
};

// The mass of a token: 1, or its contract::TokenWeight against the row's maximum.
template <bool kWeighted>
__device__ __forceinline__ uint64_t MassOf(float z, float row_max) {
  if (!kWeighted) return 1;
  const float weight = WeightAt(fmaxf(contract::Sub(z, row_max), kLeastDistance));
  return static_cast<uint64_t>(contract::Mul(weight, 0x1p40f));
}

// Puts some of a row's tokens into bins in the row's order: by distance from the maximum, or by key
// once an interval of keys is known.
struct Binning {
  bool by_key;
  float row_max;
  uint64_t low;  // with by_key: keys [low, high]
  uint64_t high;
  int shift;

  // Returns kBins if the token is in no bin, as all filtered tokens are.
  __device__ uint32_t BinOf(float z, int32_t id) const {
    if (z == kMinusInfinity) return kBins;
    if (!by_key) {
      // These bins are monotone because rounding is. A bin is an eighth of a nat wide; the last one
      // is unbounded.
      const float scaled = contract::Mul(contract::Sub(row_max, z), 8.0f);
      return static_cast<uint32_t>(fminf(scaled, static_cast<float>(kBins - 1)));
    }
    const uint64_t key = TokenKey(z, id);
    return key > high || key < low ? kBins : static_cast<uint32_t>((high - key) >> shift);
  }
};

template <bool kWeighted>
__device__ __forceinline__ void AddToBin(OrderScratch& scratch, uint32_t bin, uint64_t mass) {
  atomicAdd(&scratch.counts[bin], 1u);
  if constexpr (kWeighted) {
    if (mass == 0) return;
    const uint32_t low = static_cast<uint32_t>(mass);
    const uint32_t carry = atomicAdd(&scratch.mass_low[bin], low) > ~low ? 1 : 0;
    const uint32_t high = static_cast<uint32_t>(mass >> 32) + carry;
    if (high != 0) atomicAdd(&scratch.mass_high[bin], high);
  }
}

__device__ __forceinline__ void ClearBins(OrderScratch& scratch) {
  if (threadIdx.x < kBins) {
    scratch.counts[threadIdx.x] = 0;
    scratch.mass_low[threadIdx.x] = 0;
    scratch.mass_high[threadIdx.x] = 0;
  }
  SyncRange();
}

// Adds the bins of all blocks into row_counts and row_mass.
template <bool kWeighted>
__device__ __forceinline__ void JoinBins(RowCluster& row, OrderScratch& scratch) {
  row.Sync();
  if (threadIdx.x < kBins) {
    uint32_t count = 0;
    uint64_t mass = 0;
#pragma unroll
    for (int r = 0; r < contract::kLeaves; ++r) {
      const OrderScratch* other = row.Of(r, &scratch);
      count += other->counts[threadIdx.x];
      if (kWeighted) {
        mass += uint64_t{other->mass_high[threadIdx.x]} << 32 | other->mass_low[threadIdx.x];
      }
    }
    scratch.row_counts[threadIdx.x] = count;
    scratch.row_mass[threadIdx.x] = kWeighted ? mass : count;
  }
  SyncRange();
}

// Counts the range's tokens in bins, and adds up the bins of the row.
template <bool kWeighted>
__device__ __forceinline__ void CountBins(RowCluster& row, const VocabRange& range,
                                          const Binning& binning, OrderScratch& scratch) {
  ClearBins(scratch);
  ForEachFour(range, [&](int i, const Four& four) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t bin = binning.BinOf(four.z[j], range.first + i + j);
      if (bin < kBins) {
        AddToBin<kWeighted>(scratch, bin, MassOf<kWeighted>(four.z[j], binning.row_max));
      }
    }
  });
  JoinBins<kWeighted>(row, scratch);
}

__device__ __forceinline__ uint64_t TotalMass(const OrderScratch& scratch) {
  uint64_t sum = 0;
  for (int b = static_cast<int>(threadIdx.x % 32); b < kBins; b += 32) sum += scratch.row_mass[b];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}

// Finds the first bin at which the mass reaches `need`: writes it to scratch.bin, and the mass
// before it to scratch.before. scratch.bin is kBins if the row's mass does not reach it.
__device__ __forceinline__ void FindBin(uint64_t need, OrderScratch& scratch) {
  constexpr int kEach = kBins / 32;
  if (threadIdx.x < 32) {
    const int lane = static_cast<int>(threadIdx.x);
    uint64_t mine = 0;
    for (int b = 0; b < kEach; ++b) mine += scratch.row_mass[lane * kEach + b];
    uint64_t before = mine;
    for (int step = 1; step < 32; step *= 2) {
      const uint64_t other = __shfl_up_sync(~0u, before, static_cast<unsigned>(step));
      if (lane >= step) before += other;
    }
    if (lane == 31 && (before < need || need == 0)) scratch.bin = kBins;
    before -= mine;
    for (int b = 0; b < kEach; ++b) {
      const uint64_t mass = scratch.row_mass[lane * kEach + b];
      if (before < need && before + mass >= need) {
        scratch.bin = static_cast<uint32_t>(lane * kEach + b);
        scratch.before = before;
      }
      before += mass;
    }
  }
  SyncRange();
}

// Gathers the keys of the tokens for which wanted(z, id) is true into scratch.gathered of every
// block, unordered. Returns their number; if it exceeds kMaxTopLogProbs, gathers nothing.
template <typename Wanted>
__device__ __forceinline__ int Gather(RowCluster& row, const VocabRange& range, Wanted wanted,
                                      OrderScratch& scratch) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) scratch.list_size = 0;
  SyncRange();
  ForEachFour(range, [&](int i, const Four& four) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int32_t id = range.first + i + j;
      if (!wanted(four.z[j], id) || i + j >= range.size) continue;
      const uint32_t at = atomicAdd(&scratch.list_size, 1u);
      if (at < kMaxTopLogProbs) scratch.list[at] = TokenKey(four.z[j], id);
    }
  });
  row.Sync();
  int ends[contract::kLeaves];
  int size = 0;
#pragma unroll
  for (int r = 0; r < contract::kLeaves; ++r) {
    size += static_cast<int>(*row.Of(r, &scratch.list_size));
    ends[r] = size;
  }
  for (int i = thread; size <= kMaxTopLogProbs && i < size; i += kRangeThreads) {
    int rank = 0;
    int begin = 0;
#pragma unroll
    for (int r = 0; r + 1 < contract::kLeaves; ++r) {
      if (i < ends[r]) continue;
      rank = r + 1;
      begin = ends[r];
    }
    scratch.gathered[i] = row.Of(rank, scratch.list)[i - begin];
  }
  SyncRange();
  return size;
}

// Sorts the gathered keys in the row's order.
__device__ __forceinline__ void SortGathered(int size, OrderScratch& scratch) {
  const int thread = static_cast<int>(threadIdx.x);
  uint64_t* keys = scratch.gathered;
  int padded = 1;
  while (padded < size) padded *= 2;
  for (int i = size + thread; i < padded; i += kRangeThreads) keys[i] = 0;
  for (int run = 2; run <= padded; run *= 2) {
    for (int step = run / 2; step > 0; step /= 2) {
      SyncRange();
      for (int pair = thread; pair < padded / 2; pair += kRangeThreads) {
        const int low = pair / step * 2 * step + pair % step;
        const uint64_t a = keys[low];
        const uint64_t b = keys[low + step];
        const bool descending = (low & run) == 0;
        if ((a < b) == descending) {
          keys[low] = b;
          keys[low + step] = a;
        }
      }
    }
  }
  SyncRange();
}

// The key, of `size` gathered ones, at which the mass reaches `need`.
template <bool kWeighted>
__device__ __forceinline__ uint64_t LastOfShortList(int size, uint64_t need, float row_max,
                                                    OrderScratch& scratch) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < size; i += kRangeThreads) {
    scratch.masses[i] = MassOf<kWeighted>(LogitOf(scratch.gathered[i]), row_max);
  }
  SyncRange();
  for (int i = thread; i < size; i += kRangeThreads) {
    const uint64_t key = scratch.gathered[i];
    uint64_t before = 0;
    for (int j = 0; j < size; ++j) before += scratch.gathered[j] > key ? scratch.masses[j] : 0;
    if (before < need && before + scratch.masses[i] >= need) scratch.last = key;
  }
  SyncRange();
  return scratch.last;
}

// The largest word of all blocks' threads, returned to every thread.
__device__ __forceinline__ uint64_t LargestOfRow(RowCluster& row, uint64_t mine,
                                                 OrderScratch& scratch) {
  if (threadIdx.x == 0) scratch.last = 0;
  for (int step = 16; step > 0; step /= 2) {
    const uint64_t other = __shfl_xor_sync(~0u, mine, step);
    mine = other > mine ? other : mine;
  }
  SyncRange();
  if (threadIdx.x % 32 == 0) {
    atomicMax(reinterpret_cast<unsigned long long*>(&scratch.last),
              static_cast<unsigned long long>(mine));
  }
  SyncRange();
  const uint64_t* words = row.Exchange(scratch.last, scratch);
  uint64_t all = 0;
  for (int r = 0; r < contract::kLeaves; ++r) {
    all = words[r] > all ? words[r] : all;
  }
  return all;
}

// The smallest and the largest key of the row that `binning` puts into `bin`.
__device__ __forceinline__ void KeysOfBin(RowCluster& row, const VocabRange& range,
                                          const Binning& binning, uint32_t bin,
                                          OrderScratch& scratch, uint64_t* low, uint64_t* high) {
  uint64_t least = ~uint64_t{0};
  uint64_t largest = 0;
  ForEachFour(range, [&](int i, const Four& four) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int32_t id = range.first + i + j;
      if (binning.BinOf(four.z[j], id) != bin) continue;
      const uint64_t key = TokenKey(four.z[j], id);
      least = key < least ? key : least;
      largest = key > largest ? key : largest;
    }
  });
  *low = ~LargestOfRow(row, ~least, scratch);
  *high = LargestOfRow(row, largest, scratch);
}

// The key of the last token of a prefix of the row's order: the shortest prefix whose mass is at
// least `count` tokens or, if kWeighted, contract::NucleusBound(mass of the row, top_p). 0: the
// row's mass is smaller. row_max: the row's largest logit.
template <bool kWeighted>
__device__ __noinline__ uint64_t LastOfPrefix(RowCluster& row, const VocabRange& range,
                                              float row_max, int32_t count, float top_p,
                                              OrderScratch& scratch) {
  Binning binning{.by_key = false, .row_max = row_max, .low = 0, .high = 0, .shift = 0};
  uint64_t need = static_cast<uint64_t>(count);
  for (;;) {
    CountBins<kWeighted>(row, range, binning, scratch);
    if (kWeighted && !binning.by_key) {
      need = static_cast<uint64_t>(
          contract::NucleusBound(static_cast<int64_t>(TotalMass(scratch)), top_p));
    }
    FindBin(need, scratch);
    const uint32_t bin = scratch.bin;
    if (bin == kBins) {
      row.Sync();
      return 0;
    }
    need -= scratch.before;
    if (scratch.row_counts[bin] <= kShortList) {
      const int size = Gather(
          row, range, [&](float z, int32_t id) { return binning.BinOf(z, id) == bin; }, scratch);
      row.Sync();
      return LastOfShortList<kWeighted>(size, need, row_max, scratch);
    }
    if (binning.by_key) {
      binning.high -= uint64_t{bin} << binning.shift;
      const uint64_t width = (uint64_t{1} << binning.shift) - 1;
      if (binning.high - binning.low > width) binning.low = binning.high - width;
      row.Sync();
    } else {
      KeysOfBin(row, range, binning, bin, scratch, &binning.low, &binning.high);
      binning.by_key = true;
    }
    const int bits = 64 - __clzll(static_cast<long long>(binning.high - binning.low));
    binning.shift = bits > 8 ? bits - 8 : 0;
  }
}

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_LOG_PROBS_ROW_ORDER_CUH_
