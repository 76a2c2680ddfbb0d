// One pass over a model's weights: reads each tensor once into private memory, hashes it, and has
// all blocks that need it packed from the very bytes that were hashed.
// INVARIANT: the digest is that of the packed bytes, even if a second reading would give others
// (ResidentWeightsTest.TheDigestIsThatOfThePackedBytes).
#ifndef ISOBIT_KERNELS_MODEL_PACK_MODEL_H_
#define ISOBIT_KERNELS_MODEL_PACK_MODEL_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/tensor_source.h"
#include "common/checkpoint/weight_reader.h"
#include "kernels/model/weights.h"

namespace isobit {

// Blocks that are packed together because they share tensors: the embedding with a head that is
// tied to it; else one alone.
struct BlockGroup {
  std::vector<int> blocks;
  std::vector<std::string> tensors;  // that they are packed from
  size_t bytes = 0;                  // of those tensors
};

struct PackModelOptions {
  std::string expected_digest;   // empty: any
  size_t max_workers = 1;        // groups in work at one time
  size_t threads_per_group = 1;  // that read a group's tensors
};

// Calls `pack` for each group of blocks of `source`, which ValidateTensors has accepted, the
// largest first, with their tensors in memory that is the call's for its time; `worker` is in [0,
// max_workers). `packing_bytes`: host memory that packing a group needs beside its tensors; both
// together stay below 16 GiB, unless one group needs more. Gives the digest of the weights that
// were packed. Errors: FinishReading's, WeightReader::Read's, or those of `pack`; whatever was
// packed is then to be dropped.
absl::StatusOr<std::string> PackModel(
    const TensorSource& source, const WeightLayout& layout, const PackModelOptions& options,
    absl::FunctionRef<size_t(const BlockGroup&)> packing_bytes,
    absl::FunctionRef<absl::Status(const BlockGroup&, const TensorSet&, size_t worker)> pack);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_PACK_MODEL_H_
