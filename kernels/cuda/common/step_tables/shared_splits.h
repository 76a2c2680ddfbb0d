// Finds, in page tables, the splits of keys that consecutive sequences of a step share. Needs no
// GPU.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_STEP_TABLES_SHARED_SPLITS_H_
#define ISOBIT_KERNELS_CUDA_COMMON_STEP_TABLES_SHARED_SPLITS_H_

#include <cstdint>

#include "absl/types/span.h"
#include "kernels/cuda/common/device/device_sequences.h"
#include "kernels/step_tables.h"

namespace isobit::cuda {

// Whether attention computes splits that sequences share only once. Changes no bit.
enum class Sharing {
  kWhereItPays,  // if that saves at least kLeastSavedItems
  kNever,
  kAlways,
};

// An item is a split for one KV head; the GPU computes about 500 at once. This is the smallest
// number of saved items for which sharing is faster, as measured, in spite of its wider row blocks.
inline constexpr int64_t kLeastSavedItems = 400;

// Two neighbours in the step share a split of contract::kSplit positions if each has one row, the
// split is below the first_position of both, and they have the same page at each of its positions
// and before. A group is the longest run of neighbours that share a split. So sequences with the
// same system prompt can be one group for the first splits and several groups for later ones. No
// group crosses a multiple of kSharingWindow.
//
// Writes the groups into `groups` [at least sequences.size()]. Those whose first sequence is in [w
// * kSharingWindow, (w + 1) * kSharingWindow) begin at that index; the remaining entries have no
// sequences. own_split [as many] gets each sequence's first split that is in no group: a group
// computes every split before it. Returns how many splits the sequences need not read again: the
// sum over groups of splits times (sequences - 1). The result depends on the tables alone.
int64_t FindSharedSplits(absl::Span<const SequenceRows> sequences, int32_t page_size,
                         absl::Span<int32_t> own_split, absl::Span<SharedSplits> groups);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_STEP_TABLES_SHARED_SPLITS_H_
