// One function an op: it enqueues the op's kernels on a stream, with the bits of the CPU backend.
// The files of the families define them, each with what it demands of its arguments.
//
// Pointers are to memory of the stream's device, which the caller has made current, unless the
// argument says host. Two threads must not run ops on one stream at the same time.
#ifndef ISOBIT_KERNELS_CUDA_COMMON_DEVICE_OPS_H_
#define ISOBIT_KERNELS_CUDA_COMMON_DEVICE_OPS_H_

#include "absl/status/status.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/ops/op_list.h"

namespace isobit::cuda {

#define ISOBIT_OP(Name) absl::Status Run(const Name##Args& args, const Stream& stream);
ISOBIT_OPS(ISOBIT_OP)
#undef ISOBIT_OP

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_COMMON_DEVICE_OPS_H_
