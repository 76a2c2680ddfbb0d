// The decode schedule of attention: a sequence's few query rows against all its keys. The keys are
// divided into the contract's splits, so that the whole GPU reads the cache. Not here: which
// sequences use the schedule (attention.h).
//
// The query rows of one KV head (tokens x heads per KV head) are packed into blocks of 8 or 16. A
// block of rows against one split is an item of work. Two schedules compute the same bits:
// - By teams: three warps take an item; one loads keys and values into a ring buffer in shared
//   memory, two compute. The device makes a list of the items from the step's tables, and a grid
//   that fills the GPU processes the list.
//   If sequences share splits (device_sequences.h), sharing teams take the rows of all of them
//   together: a split's result depends only on its row and its keys. Each sequence then has items
//   of its own for the splits behind the shared ones.
// - By clusters (decode_cluster.h): for so few items that teams would leave most of the GPU idle.
// A second, small kernel folds the results of the splits.
//
// The walk is the kernel by teams, but one team takes all splits of a block of rows one after the
// other and folds as it goes. It takes any number of rows and needs no workspace; small batches
// leave most of the GPU idle.
#ifndef ISOBIT_KERNELS_CUDA_SM90_ATTENTION_DECODE_H_
#define ISOBIT_KERNELS_CUDA_SM90_ATTENTION_DECODE_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/common/device/device_sequences.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/cuda/sm90/attention/attention.h"
#include "kernels/ops/attention.h"

namespace isobit::cuda {

inline constexpr int32_t kMaxHeadDim = 256;

// Bytes of workspace for LaunchDecodeAttention with these arguments.
size_t DecodeWorkspaceBytes(const AttentionArgs& args, const DeviceSequences& sequences,
                            int32_t max_tokens);

// Attention for the sequences of 1 to max_tokens rows; rows of longer ones are left unchanged. Does
// not read args.sequences: `sequences` is the same table in GPU memory. INTERNAL: CUDA refused a
// launch.
absl::Status LaunchDecodeAttention(const AttentionArgs& args, const DeviceSequences& sequences,
                                   int32_t max_tokens, const AttentionWorkspace& workspace,
                                   const Stream& stream);

// How the splits are distributed over the GPU.
struct DecodeSchedule {
  // What computes a split.
  enum Kind { kTeams, kSharingTeams, kClusters };
  Kind kind = kTeams;
  int clusters = 0;  // kClusters: number of clusters for each block of query rows
};

// The schedule that LaunchDecodeAttention uses: a pure function of the card, shapes and bounds.
DecodeSchedule ChooseDecodeSchedule(const Card& card, const AttentionArgs& args,
                                    const DeviceSequences& sequences, int32_t max_tokens);

// The same with a given schedule, for tests and tuning. INVALID_ARGUMENT: kClusters with keys that
// are not whole 16-byte units; kSharingTeams with several tokens, with a window below
// max_positions, or with tables without groups.
absl::Status LaunchDecodeAttentionAs(const DecodeSchedule& schedule, const AttentionArgs& args,
                                     const DeviceSequences& sequences, int32_t max_tokens,
                                     const AttentionWorkspace& workspace, const Stream& stream);

// Attention for the sequences of at least min_tokens rows, for head sizes and page sizes that no
// other schedule supports. INTERNAL: CUDA refused a launch.
absl::Status LaunchWalkAttention(const AttentionArgs& args, const DeviceSequences& sequences,
                                 int32_t min_tokens, const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_ATTENTION_DECODE_H_
