// The prefill schedule of attention: many rows of a sequence share one pass over its keys, on
// wgmma.
#ifndef ISOBIT_KERNELS_CUDA_ATTENTION_PREFILL_H_
#define ISOBIT_KERNELS_CUDA_ATTENTION_PREFILL_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/device/device_sequences.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/ops.h"

namespace isobit::cuda {

// Whether the schedule is built for this head size: 64, 96, 128 and 256.
bool HasPrefillSchedule(int32_t head_dim);

// Runs attention for the sequences of at least min_rows rows; rows of shorter ones are left as they
// are. args.sequences is not read: `sequences` is the same table in GPU memory. The order of the
// rows, the page size and the batch change no bit. Fastest if the page size is a multiple of 8: any
// other page size takes a slower gather.
// INVALID_ARGUMENT: no schedule for the head size, or a cache that is not aligned to 16 bytes;
// INTERNAL: CUDA refused.
absl::Status LaunchPrefillAttention(const AttentionArgs& args, const DeviceSequences& sequences,
                                    int32_t min_rows, const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_ATTENTION_PREFILL_H_
