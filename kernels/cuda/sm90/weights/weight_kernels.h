// Processes weights that are already in a GPU's memory: rounds, packs, unpacks, and sums for the
// weight digest. Every function only enqueues. Weights take part in no arithmetic here, so the bits
// are those of the host's functions, which each comment names.
#ifndef ISOBIT_KERNELS_CUDA_SM90_WEIGHTS_WEIGHT_KERNELS_H_
#define ISOBIT_KERNELS_CUDA_SM90_WEIGHTS_WEIGHT_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/common/device/launch.h"
#include "kernels/device_packer.h"

namespace isobit::cuda {

// Like ConvertToBf16 (common/checkpoint/dtype.h).
absl::Status RoundWeights(const StoredMatrix& from, Bf16* to, int64_t to_stride,
                          const Stream& stream);

// Like PackLinear (kernels/cuda/sm90/linear/layout.h), for w without gaps.
absl::Status PackLinearOnDevice(const LinearShape& shape, const Bf16* w, std::byte* packed,
                                const Stream& stream);

// Restores the weights w, without gaps, from which PackLinear made `weight`; this is the layout of
// PlainWeightPacker (kernels/plain_weight_packer.h).
absl::Status UnpackLinearOnDevice(const LinearWeight& weight, Bf16* w, const Stream& stream);

absl::Status WidenBiases(const Bf16* from, int64_t count, float* to, const Stream& stream);

// Like TensorDigester (common/checkpoint/weight_digest.h), for values rounded to bf16. See
// DevicePacker::AddSums; sums: [kWeightSums].
absl::Status AddWeightSums(const StoredMatrix& from, const PartOfTensor& part, uint64_t* sums,
                           const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_WEIGHTS_WEIGHT_KERNELS_H_
