// Weights for a model that a test runs on its own, without the services' PrepareWeights.
#ifndef ISOBIT_TESTS_SUPPORT_PREPARE_BLOCKS_H_
#define ISOBIT_TESTS_SUPPORT_PREPARE_BLOCKS_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/tensor_source.h"
#include "kernels/model/pack_model.h"
#include "kernels/model/resident_weights.h"

namespace isobit::testing_support {

struct PreparedWeights {
  PreparedRanks ranks;
  std::string digest;  // of exactly these weights, 64 hex digits
};

// Packs `source` for these ranks; each then takes its blocks by Commit. expected_digest: empty, or
// what the weights must have. Errors: those of PackModel.
inline absl::StatusOr<PreparedWeights> PrepareBlocks(const TensorSource& source,
                                                     const std::string& expected_digest,
                                                     const std::vector<ResidentWeights*>& ranks) {
  ResidentStore store(ranks);
  ISOBIT_ASSIGN_OR_RETURN(std::string digest, PackModel(source, expected_digest, store));
  return PreparedWeights{store.Take(), std::move(digest)};
}

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_SUPPORT_PREPARE_BLOCKS_H_
