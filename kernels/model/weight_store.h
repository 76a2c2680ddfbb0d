// Where packed blocks go: memory for one new version of the weights on all ranks of a process.
#ifndef ISOBIT_KERNELS_MODEL_WEIGHT_STORE_H_
#define ISOBIT_KERNELS_MODEL_WEIGHT_STORE_H_

#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/model/weights.h"

namespace isobit {

// A block to be packed.
struct PackTask {
  const WeightLayout* layout;
  int block;
  size_t bytes;                // at least layout->BlockBytes(block); the rest is zeros
  size_t rank = 0;             // the store's number of whom it is for
  std::byte* place = nullptr;  // host memory of `bytes` to pack it into; null: it goes to Put
};

// Filled once, by PackModel.
class WeightStore {
 public:
  virtual ~WeightStore() = default;

  // Takes memory for all blocks, and says what is to be packed. The weights that serve stay as they
  // are. RESOURCE_EXHAUSTED: not that much memory.
  virtual absl::StatusOr<std::vector<PackTask>> Plan() = 0;

  // Takes the bytes of a packed block, which stay only for the call. Thread safe.
  virtual absl::Status Put(const PackTask& task, const std::byte* packed) = 0;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_WEIGHT_STORE_H_
