// Where packed blocks go: memory for one new version of the weights on all ranks of a process.
#ifndef ISOBIT_KERNELS_MODEL_WEIGHT_STORE_H_
#define ISOBIT_KERNELS_MODEL_WEIGHT_STORE_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/weight_digest.h"
#include "kernels/device_packer.h"
#include "kernels/model/weights.h"

namespace isobit {

// A block to be packed.
struct PackTask {
  const WeightLayout* layout;
  int block;
  size_t bytes;                // at least layout->BlockBytes(block); the rest is zeros
  size_t rank = 0;             // whose block it is, as the store numbers ranks
  std::byte* place = nullptr;  // host memory to pack into; null: pass the block to Put
};

// Filled once, by PackModel.
class WeightStore {
 public:
  virtual ~WeightStore() = default;

  // Allocates memory for all blocks and returns the blocks to pack. The weights that serve do not
  // change. RESOURCE_EXHAUSTED: not enough memory.
  virtual absl::StatusOr<std::vector<PackTask>> Plan() = 0;

  // Stores the bytes of a packed block, which are valid only during the call. Thread safe.
  virtual absl::Status Put(const PackTask& task, const std::byte* packed) = 0;

  // For blocks that are packed in the device's memory: what packs those of a rank, and where a
  // block is to be packed there; null: anywhere in that memory, and then passed to Put.
  // UNIMPLEMENTED: the rank computes in host memory.
  virtual absl::StatusOr<std::unique_ptr<DevicePacker>> MakePacker(size_t /*rank*/) {
    return absl::UnimplementedError("the weights are in host memory");
  }
  virtual std::byte* DevicePlaceOf(const PackTask& /*task*/) const { return nullptr; }

  // Of the tensors that were packed; empty until all are, and of weights made from a seed.
  const TensorDigests& tensor_digests() const { return tensor_digests_; }
  void KeepDigests(const TensorDigests& digests) { tensor_digests_ = digests; }

 private:
  TensorDigests tensor_digests_;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_WEIGHT_STORE_H_
