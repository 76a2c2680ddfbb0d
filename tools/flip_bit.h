// Damages a model on purpose by one bit, the least there is: a comparator must see it.
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

// Copies the files of the model directory `from` to `to`, which it creates, and flips one bit of
// one weight in the copy. Returns what changed, for people. NOT_FOUND: no such tensor.
// INVALID_ARGUMENT: index or bit out of range; a malformed safetensors file. ALREADY_EXISTS: `to`
// is not empty. After any other error `to` is removed.
absl::StatusOr<std::string> FlipBit(const std::string& from, const FlippedBit& what,
                                    const std::string& to);

}  // namespace isobit

#endif  // ISOBIT_TOOLS_FLIP_BIT_H_
