// Packs weights that are already in a device's memory, such as a trainer's on the same GPU. Does
// what WeightPacker does on the host, and also rounds to bf16 and sums for the weight digest. Not
// here: which slice of which tensor a rank needs (kernels/model/pack_from_device.h).
#ifndef ISOBIT_KERNELS_DEVICE_PACKER_H_
#define ISOBIT_KERNELS_DEVICE_PACKER_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/parallel/weight_senders.h"
#include "kernels/device.h"
#include "kernels/ops/linear_shape.h"
#include "kernels/ops/stored_weights.h"
#include "kernels/weight_packer.h"

namespace isobit {

// Memory of another process, mapped into this one.
struct ForeignMemory {
  const std::byte* begin = nullptr;
  size_t bytes = 0;
};

// One rank's packer, used on one thread. Its work is enqueued in order, apart from the rank's ops;
// Finish waits for it. Pointers are the device's, unless they say otherwise.
class DevicePacker {
 public:
  virtual ~DevicePacker() = default;

  // Memory for intermediate data, freed with the object. RESOURCE_EXHAUSTED: too little would be
  // left for the ops.
  virtual absl::StatusOr<Memory> Allocate(size_t bytes) = 0;

  // Maps memory of another process, by the handle that it has exported (cudaIpcMemHandle_t). It is
  // readable until this object is destroyed. INVALID_ARGUMENT: the handle is malformed, or its
  // process is not on this host.
  virtual absl::StatusOr<ForeignMemory> MapForeign(const std::string& handle) = 0;

  // The senders to this rank, whose transfers are enqueued with this object's work. Null: the
  // device has none.
  virtual WeightSenders* senders() { return nullptr; }

  // Rounds `from` to bf16: to nearest, ties to even; a NaN keeps its sign and becomes quiet. to:
  // rows of from.columns values, `to_stride` from one row to the next.
  virtual absl::Status Round(const StoredMatrix& from, Bf16* to, int64_t to_stride) = 0;

  // As layout.Pack, for w [shape.n, shape.k] without gaps. Writes every byte of `packed`.
  virtual absl::Status Pack(const LinearShape& shape, const WeightPacker& layout, const Bf16* w,
                            std::byte* packed) = 0;

  // Converts biases, bf16 values that are added in fp32.
  virtual absl::Status Widen(const Bf16* from, int64_t count, float* to) = 0;

  virtual absl::Status FillWithZeros(std::byte* to, size_t bytes) = 0;

  // Adds the digest sums of a slice of a tensor (docs/API.md, "The weight digest") to sums[0] and
  // sums[1], and raises sums[2] as kWeightSums says. values: [rows, columns] without gaps.
  // part.first_column is a multiple of 4, and so is `columns` unless the slice ends its rows.
  virtual absl::Status AddSums(const Bf16* values, int64_t rows, int64_t columns,
                               const PartOfTensor& part, uint64_t* sums) = 0;

  // Copies between the device's memory and the host's, or within the device's.
  virtual absl::Status Copy(void* to, const void* from, size_t bytes) = 0;

  // Waits for all enqueued work.
  virtual absl::Status Finish() = 0;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_DEVICE_PACKER_H_
