// What becomes of weights that are in a GPU's memory already: rounded, packed, unpacked, summed for
// the weight digest. Every function only enqueues. Weights take part in no arithmetic here, so that
// bits are those of the host's functions, which each comment names.
#ifndef ISOBIT_KERNELS_CUDA_WEIGHTS_WEIGHT_KERNELS_H_
#define ISOBIT_KERNELS_CUDA_WEIGHTS_WEIGHT_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/device_packer.h"

namespace isobit::cuda {

// As ConvertToBf16 (common/checkpoint/dtype.h).
absl::Status RoundWeights(const StoredMatrix& from, Bf16* to, int64_t to_stride,
                          const Stream& stream);

// As PackLinear (kernels/cuda/linear/layout.h), for w without gaps.
absl::Status PackLinearOnDevice(const LinearShape& shape, const Bf16* w, std::byte* packed,
                                const Stream& stream);

// The weights w, without gaps, that PackLinear made `weight` of: what PlainWeightPacker
// (kernels/plain_weight_packer.h) makes of them.
absl::Status UnpackLinearOnDevice(const LinearWeight& weight, Bf16* w, const Stream& stream);

absl::Status WidenBiases(const Bf16* from, int64_t count, float* to, const Stream& stream);

// As TensorDigester (common/checkpoint/weight_digest.h), of values rounded to bf16. See
// DevicePacker::AddSums; sums: [kWeightSums].
absl::Status AddWeightSums(const StoredMatrix& from, const PartOfTensor& part, uint64_t* sums,
                           const Stream& stream);

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_WEIGHTS_WEIGHT_KERNELS_H_
