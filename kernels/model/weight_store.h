// Where packed blocks go: memory for a new version of the weights, for all ranks of a process.
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
  size_t rank = 0;             // the rank it is for, by the store's numbering
  std::byte* place = nullptr;  // host memory to pack into; null: pass the block to Put
};

// Filled once, by PackModel.
class WeightStore {
 public:
  virtual ~WeightStore() = default;

  // Allocates memory for all blocks and returns the blocks to pack. The serving weights do not
  // change. RESOURCE_EXHAUSTED: there is too little memory.
  virtual absl::StatusOr<std::vector<PackTask>> Plan() = 0;

  // Stores the bytes of a packed block, which are valid only during the call. Thread-safe.
  virtual absl::Status Put(const PackTask& task, const std::byte* packed) = 0;

  // For blocks packed in the device's memory. MakePacker returns the packer of a rank.
  // DevicePlaceOf returns the destination of a block; null: any memory there, from which Put copies
  // it. UNIMPLEMENTED: the rank computes in host memory.
  virtual absl::StatusOr<std::unique_ptr<DevicePacker>> MakePacker(size_t /*rank*/) {
    return absl::UnimplementedError("the weights are in host memory");
  }
  virtual std::byte* DevicePlaceOf(const PackTask& /*task*/) const { return nullptr; }

  // Digests of the packed tensors. Empty until all are packed, and for weights made from a seed.
  const TensorDigests& tensor_digests() const { return tensor_digests_; }
  void KeepDigests(const TensorDigests& digests) { tensor_digests_ = digests; }

 private:
  TensorDigests tensor_digests_;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_MODEL_WEIGHT_STORE_H_
