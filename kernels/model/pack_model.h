// One pass over a model's weights: reads each tensor once into private memory, hashes it, and packs
// all blocks that need it from exactly the bytes that were hashed.
// INVARIANT: the digest is that of the packed bytes, even if reading again would return others
// (ResidentWeightsTest.TheDigestIsThatOfThePackedBytes).
#ifndef ISOBIT_KERNELS_MODEL_PACK_MODEL_H_
#define ISOBIT_KERNELS_MODEL_PACK_MODEL_H_

#include <string>

#include "absl/status/statusor.h"
#include "common/checkpoint/tensor_source.h"
#include "kernels/model/weight_store.h"

namespace isobit {

// Packs the weights of `source`, which ValidateTensors has accepted, into `store`, on all cores.
// Blocks with common tensors are packed together: a tied head with the embedding. Tensors and
// packed blocks that wait for the store take less than 16 GiB of host memory, unless the blocks of
// a single tensor need more. Returns the digest of the packed weights, 64 hex digits. Errors: those
// of CheckDigests with `expected_digest`, of WeightReader::Read and of the store; weights must be
// finite in bf16 unless `allow_nonfinite`. After an error, drop what was packed.
absl::StatusOr<std::string> PackModel(const TensorSource& source,
                                      const std::string& expected_digest, WeightStore& store,
                                      bool allow_nonfinite = false);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_PACK_MODEL_H_
