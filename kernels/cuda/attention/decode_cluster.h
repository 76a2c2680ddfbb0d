// The decode schedule of attention for few sequences (decode.h), where a team to a split
// would leave most of the GPU idle: a cluster of four blocks takes a split. Not here: the choice
// (decode.cu).
#ifndef ISOBIT_KERNELS_CUDA_ATTENTION_DECODE_CLUSTER_H_
#define ISOBIT_KERNELS_CUDA_ATTENTION_DECODE_CLUSTER_H_

#include "absl/status/status.h"
#include "kernels/cuda/attention/decode_work.cuh"
#include "kernels/cuda/device/launch.h"

namespace isobit::cuda {

// The results of all splits of the listed sequences, `clusters` clusters to each block of query
// rows, which take its splits in turn. Keys and values are whole 16-byte units
// (params.whole_units). INTERNAL: CUDA refused.
absl::Status LaunchDecodeClusters(const DecodeParams& params, int clusters, const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_ATTENTION_DECODE_CLUSTER_H_
