// Packs weights into the layout that a backend's linear layers read: once, at load time, on any
// machine. Not here: a rank's slice of a model's weights.
#ifndef ISOBIT_KERNELS_WEIGHT_PACKER_H_
#define ISOBIT_KERNELS_WEIGHT_PACKER_H_

#include <cstddef>
#include <cstdint>

#include "kernels/ops/linear_shape.h"

namespace isobit {

// A pure function of shape and weights: it needs neither the device that will read them nor memory
// of its own. Each backend has one packer, which lives as long as the program. Thread-safe.
class WeightPacker {
 public:
  virtual ~WeightPacker() = default;

  // Whether Pack just copies rows, without gaps.
  virtual bool keeps_rows() const { return false; }

  // The size of a packed weight matrix in bytes.
  virtual size_t PackedBytes(const LinearShape& shape) const = 0;

  // Packs w [shape.n, shape.k], leading dimension ldw, into `packed`: PackedBytes(shape) bytes,
  // 128-byte aligned. Both are host memory. Does not write the padding between weights: a caller
  // that needs equal bytes for equal weights must set it to zeros first.
  virtual void Pack(const LinearShape& shape, const Bf16* w, int64_t ldw,
                    std::byte* packed) const = 0;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_WEIGHT_PACKER_H_
