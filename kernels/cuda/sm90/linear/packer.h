// Packs weights for the linear layers (layout.h), on the host. Needs no GPU.
#ifndef ISOBIT_KERNELS_CUDA_SM90_LINEAR_PACKER_H_
#define ISOBIT_KERNELS_CUDA_SM90_LINEAR_PACKER_H_

#include "kernels/weight_packer.h"

namespace isobit::cuda {

const WeightPacker& LinearPacker();

}  // namespace isobit::cuda

#endif  // ISOBIT_KERNELS_CUDA_SM90_LINEAR_PACKER_H_
