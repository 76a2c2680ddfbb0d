// The decode schedule of attention for few sequences (decode.h), for which one team per split would
// leave most of the GPU idle: a cluster of four blocks computes a split. Not here: the choice of
// the schedule (decode.cu).
#ifndef ISOBIT_KERNELS_CUDA_SM90_ATTENTION_DECODE_CLUSTER_H_
#define ISOBIT_KERNELS_CUDA_SM90_ATTENTION_DECODE_CLUSTER_H_

#include "absl/status/status.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/cuda/sm90/attention/decode_work.cuh"

namespace isobit::cuda {

// Computes the results of all splits of the listed sequences. Each block of query rows gets
// `clusters` clusters, which take its splits in turn. Keys and values must consist of whole 16-byte
// units (params.whole_units). INTERNAL: CUDA refused a launch.
absl::Status LaunchDecodeClusters(const DecodeParams& params, int clusters, const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_ATTENTION_DECODE_CLUSTER_H_
