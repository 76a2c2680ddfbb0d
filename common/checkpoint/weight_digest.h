// What identifies weights: a digest of their bf16 values that can be computed in any order, from
// any split and any stored dtype. docs/API.md, "The weight digest", defines it;
// python/isobit/weight_digest.py computes the same in NumPy. It detects faults and mix-ups, but is
// not collision resistant against an adversary.
#ifndef ISOBIT_COMMON_CHECKPOINT_WEIGHT_DIGEST_H_
#define ISOBIT_COMMON_CHECKPOINT_WEIGHT_DIGEST_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "common/checkpoint/dtype.h"
#include "common/checkpoint/safetensors.h"

namespace isobit {

// Digests one tensor, whose values come in row-major order, in any portions. INVARIANT: the result
// depends on shape and values alone, not on portions or dtype
// (WeightDigestTest.PortionsAndDTypesDoNotMatter).
class TensorDigester {
 public:
  explicit TensorDigester(const std::vector<int64_t>& shape);

  // Adds the next `count` values, of any alignment. They are rounded to bf16.
  void Add(DType dtype, const void* values, size_t count);

  // The digest of all values so far, 32 hex digits.
  std::string Hex() const;

  // The row-major index of the first value so far that is a NaN or an infinity in bf16.
  std::optional<uint64_t> first_nonfinite() const { return first_nonfinite_; }

 private:
  void AddBf16(const uint8_t* values, size_t count);
  void AddWord(uint64_t word);
  void NoteNonfinite(const uint8_t* values, size_t count);

  size_t row_values_;   // after them the last word is filled with zeros
  size_t in_row_ = 0;   // values of the current row so far
  uint64_t index_ = 0;  // of the next word
  uint64_t part_ = 0;   // that word's values so far
  uint64_t num_values_ = 0;
  std::optional<uint64_t> first_nonfinite_;
  std::array<uint64_t, 2> sums_{};
};

// The digest of a tensor whose values are in memory.
std::string TensorDigest(const Tensor& tensor);

struct ShapedDigest {
  std::vector<int64_t> shape;
  std::string digest;  // TensorDigester::Hex

  bool operator==(const ShapedDigest& other) const = default;
};

// The digests of all tensors of some weights, by name.
using TensorDigests = std::map<std::string, ShapedDigest>;

// Keeps only tensors that are weights. Left out are rotary buffers, which are not used, and an
// lm_head equal to the embedding, because a model with tied embeddings may or may not store it.
TensorDigests DigestsOfWeights(const TensorDigests& tensors);

// The digest of weights, 64 hex digits, from the digests of their tensors. INVARIANT: what a
// checkpoint stores besides weights does not change it (WeightDigestTest.OneModelHasOneDigest).
std::string WeightDigest(const TensorDigests& tensors);

// INVALID_ARGUMENT, naming the tensor and the value's indices: the value at the row-major index
// `place` is not finite in bf16.
absl::Status NonfiniteError(absl::string_view name, const std::vector<int64_t>& shape,
                            uint64_t place);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_WEIGHT_DIGEST_H_
