// The prefill schedule of attention, on wgmma: many rows of a sequence share one pass over its
// keys.
#ifndef ISOBIT_KERNELS_CUDA_SM90_ATTENTION_PREFILL_H_
#define ISOBIT_KERNELS_CUDA_SM90_ATTENTION_PREFILL_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/common/device/device_sequences.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/ops/attention.h"

namespace isobit::cuda {

// Whether the schedule is built for this head size. It is for 64, 96, 128 and 256.
bool HasPrefillSchedule(int32_t head_dim);

// Runs attention for the sequences of at least min_rows rows; rows of shorter
// ones are left unchanged. Does not read args.sequences: `sequences` is the
// same table in GPU memory. The order of rows, the page size and the batch
// change no bit. Fastest with page sizes that are multiples of 8; others use
// a slower gather. INVALID_ARGUMENT: there is no schedule for the head size,
// or the cache is not aligned to 16 bytes. INTERNAL: CUDA refused a launch.
absl::Status LaunchPrefillAttention(const AttentionArgs& args, const DeviceSequences& sequences,
                                    int32_t min_rows, const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_ATTENTION_PREFILL_H_
