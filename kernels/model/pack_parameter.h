// Slices, stacks, converts and packs one parameter, from the checkpoint's tensors into a weight
// block.
#ifndef ISOBIT_KERNELS_MODEL_PACK_PARAMETER_H_
#define ISOBIT_KERNELS_MODEL_PACK_PARAMETER_H_

#include <cstddef>

#include "common/checkpoint/tensor_plan.h"
#include "common/checkpoint/weight_reader.h"
#include "kernels/blocks/rank_shape.h"
#include "kernels/weight_packer.h"

namespace isobit {

// The size of the rank's share of a parameter in a block.
size_t PackedBytesOf(const Parameter& parameter, const RankShape& rank, const WeightPacker& packer);

// Writes the rank's share to `out`. `tensors` contains the parameter's tensors.
void PackParameter(const Parameter& parameter, const RankShape& rank, const TensorSet& tensors,
                   const WeightPacker& packer, std::byte* out);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_PACK_PARAMETER_H_
