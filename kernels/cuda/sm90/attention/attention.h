// Attention over paged keys and values (contract C6): the choice of the schedule for each sequence.
//
// Sequences of few rows use the decode schedule (decode.h). The others use the prefill schedule
// (prefill.h) if it is built for the head dimension; otherwise the decode schedule's walk over all
// splits. The step's bounds determine how many rows are few. All schedules give the same bits.
#ifndef ISOBIT_KERNELS_CUDA_SM90_ATTENTION_ATTENTION_H_
#define ISOBIT_KERNELS_CUDA_SM90_ATTENTION_ATTENTION_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/ops/attention.h"

namespace isobit::cuda {

// Scratch in GPU memory, aligned to 256 bytes, used
// by one call at a time. Needs no initialisation.
struct AttentionWorkspace {
  std::byte* data = nullptr;
  size_t bytes = 0;
};

// The workspace, in bytes, that a call with these arguments needs. It depends on the shapes and on
// the bounds in args.sequences.device, never on the content of a table.
size_t AttentionWorkspaceBytes(const AttentionArgs& args);

// Attention with a given workspace. Reads args.sequences.device, whose bounds decide the launches:
// the tables may change between replays of a captured call. INVALID_ARGUMENT: head_dim is odd or
// above 256, heads is no multiple of kv_heads, there are no device tables, or the workspace is too
// small. INTERNAL: CUDA refused a launch.
absl::Status LaunchAttention(const AttentionArgs& args, const AttentionWorkspace& workspace,
                             const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_ATTENTION_ATTENTION_H_
