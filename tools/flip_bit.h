// Damages a model on purpose and by the least possible: a comparator that does not see the
// difference is of no use.
#ifndef ISOBIT_TOOLS_FLIP_BIT_H_
#define ISOBIT_TOOLS_FLIP_BIT_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace isobit {

struct FlippedBit {
  std::string tensor;
  uint64_t index = 0;  // of the element, row-major
  int bit = 0;         // 0: the lowest of its mantissa
};

// Copies the files of the model directory `from` to `to`, creating it, with one bit of one weight
// flipped; all other bytes stay. Returns what changed, for people. NOT_FOUND: no such tensor.
// INVALID_ARGUMENT: index or bit out of range; a malformed safetensors file. ALREADY_EXISTS: `to`
// is not empty; after any other error it is gone.
absl::StatusOr<std::string> FlipBit(const std::string& from, const FlippedBit& what,
                                    const std::string& to);

}  // namespace isobit

#endif  // ISOBIT_TOOLS_FLIP_BIT_H_
