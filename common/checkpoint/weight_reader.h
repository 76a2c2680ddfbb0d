// Reads weights into private memory, each tensor once, and digests exactly the bytes that it hands
// out. So the reported digest is that of the packed weights, whatever happens to the files
// meanwhile.
#ifndef ISOBIT_COMMON_CHECKPOINT_WEIGHT_READER_H_
#define ISOBIT_COMMON_CHECKPOINT_WEIGHT_READER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/checkpoint/tensor_source.h"
#include "common/checkpoint/weight_digest.h"

namespace isobit {

// Some tensors in one piece of memory, which the next Read reuses. Movable.
class TensorSet {
 public:
  const Tensor* Find(absl::string_view name) const { return FindTensor(tensors_, name); }

 private:
  friend class WeightReader;
  std::vector<Tensor> tensors_;  // sorted by name
  std::unique_ptr<uint8_t[]> memory_;
  size_t capacity_ = 0;  // bytes
};

struct CheckpointDigests {
  TensorDigests tensors;   // empty for a known_digest
  std::string checkpoint;  // WeightDigest of them, or the known_digest
};

// INVARIANT: the digest is that of the bytes handed out, even while the files are overwritten
// (WeightReaderTest.TheDigestIsThatOfTheBytesHandedOut).
class WeightReader {
 public:
  // `source` outlives the object. Unless `allow_nonfinite`, weights must be finite in bf16.
  explicit WeightReader(const TensorSource& source, bool allow_nonfinite = false);

  // Reads the named tensors into `out`, replacing its content, on at most `max_workers` threads.
  // The source must have them all, and none may have been read before. Thread-safe for different
  // `out`. Errors: the source's, naming the tensor; NonfiniteError; RESOURCE_EXHAUSTED: no memory.
  absl::Status Read(const std::vector<std::string>& names, size_t max_workers, TensorSet& out);

  // Call it once, after the last Read. Reads the remaining tensors through a small buffer and
  // returns the digests of all. Errors: those of the source, including CheckUnchanged's;
  // NonfiniteError.
  absl::StatusOr<CheckpointDigests> Finish();

 private:
  // Reads a tensor to `out`; if that is null, only hashes it.
  absl::Status ReadTensor(size_t tensor, uint8_t* out);

  const TensorSource& source_;
  const bool hashes_;
  const bool allow_nonfinite_;
  std::vector<std::string> digests_;  // [tensor]; empty until it has been read
};

// Reads all tensors of a source once and returns their digests.
absl::StatusOr<CheckpointDigests> DigestTensors(const TensorSource& source,
                                                bool allow_nonfinite = false);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_WEIGHT_READER_H_
