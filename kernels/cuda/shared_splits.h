// Finds the splits of keys that consecutive sequences of a step share, from their page tables. It
// needs no GPU.
#ifndef ISOBIT_KERNELS_CUDA_SHARED_SPLITS_H_
#define ISOBIT_KERNELS_CUDA_SHARED_SPLITS_H_

#include <cstdint>

#include "absl/types/span.h"
#include "kernels/cuda/device/device_sequences.h"
#include "kernels/step_tables.h"

namespace isobit::cuda {

// Whether attention computes splits that sequences share once for all of them. Bits do not change.
enum class Sharing {
  kWhereItPays,  // if that saves kLeastSavedItems
  kNever,
  kAlways,
};

// Items are a split for a KV head, and the GPU takes some 500 at once. From so many saved on,
// sharing outweighs its kernel's wider blocks of rows, as measured.
inline constexpr int64_t kLeastSavedItems = 400;

// Two neighbours in the step share a split of contract::kSplit positions if each has one row, the
// split lies below the first_position of both, and every page with one of its positions, and every
// page before, is the same. A run of neighbours that share it, as long as possible, is a group. So
// sequences with the same system prompt can be one group for the first splits, and several groups
// for later ones. No group crosses a multiple of kSharingWindow.
//
// Writes the groups into `groups` [sequences.size() or more]. Those whose first sequence lies in
// [w * kSharingWindow, (w + 1) * kSharingWindow) come first from there on; what is left has no
// sequences. own_split [as many] gets each sequence's first split that is in no group: a group
// computes every split before it. Returns how many splits the sequences need not read again: for
// each group, its splits times (its sequences - 1). The result depends on the tables alone.
int64_t FindSharedSplits(absl::Span<const SequenceRows> sequences, int32_t page_size,
                         absl::Span<int32_t> own_split, absl::Span<SharedSplits> groups);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SHARED_SPLITS_H_
