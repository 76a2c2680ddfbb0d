// The decode schedule of attention: few query rows of a sequence against all its keys, cut into the
// contract's splits so that the cache streams through the whole GPU. Not here: which sequences it
// gets (attention.h).
//
// The query rows of one KV head's group (tokens x heads of the group) are packed into blocks of 8
// or 16, and a block of rows against one split is an item of work. Two schedules have the same
// bits. By teams: three warps take an item, one of which brings keys and values into a ring in
// shared memory while two compute; a list of the items is made from the tables on the device, and a
// grid that fills the GPU walks it. By clusters (decode_cluster.h): for items so few that
// teams would leave most of the GPU idle. The splits' results meet in a second, small kernel.
//
// The walk is the same kernel with a block's splits taken one after the other by one team, which
// folds as it goes: any number of rows, no workspace, little parallelism for short batches.
#ifndef ISOBIT_KERNELS_CUDA_ATTENTION_DECODE_H_
#define ISOBIT_KERNELS_CUDA_ATTENTION_DECODE_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/device/device_sequences.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/ops.h"

namespace isobit::cuda {

inline constexpr int32_t kMaxHeadDim = 256;

// Bytes of workspace for LaunchDecodeAttention with these arguments.
size_t DecodeWorkspaceBytes(const AttentionArgs& args, const DeviceSequences& sequences,
                            int32_t max_tokens);

// Attention for the sequences of 1 to max_tokens rows; rows of longer ones are left as they are.
// args.sequences is not read: `sequences` is the same table in GPU memory. INTERNAL: CUDA refused.
absl::Status LaunchDecodeAttention(const AttentionArgs& args, const DeviceSequences& sequences,
                                   int32_t max_tokens, const AttentionWorkspace& workspace,
                                   const Stream& stream);

// How the splits are spread over the GPU.
struct DecodeSchedule {
  enum Kind { kTeams, kClusters };  // what takes a split
  Kind kind = kTeams;
  int clusters = 0;  // kClusters: for each block of query rows
};

// The schedule that LaunchDecodeAttention takes: a pure function of the shapes and bounds.
DecodeSchedule ChooseDecodeSchedule(const AttentionArgs& args, const DeviceSequences& sequences,
                                    int32_t max_tokens);

// The same with a given schedule, for tests and tuning. INVALID_ARGUMENT: clusters cannot take
// these keys, which are no whole 16-byte units.
absl::Status LaunchDecodeAttentionAs(const DecodeSchedule& schedule, const AttentionArgs& args,
                                     const DeviceSequences& sequences, int32_t max_tokens,
                                     const AttentionWorkspace& workspace, const Stream& stream);

// Attention for the sequences of at least min_tokens rows, for head sizes and page sizes that no
// other schedule has. INTERNAL: CUDA refused.
absl::Status LaunchWalkAttention(const AttentionArgs& args, const DeviceSequences& sequences,
                                 int32_t min_tokens, const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_ATTENTION_DECODE_H_
