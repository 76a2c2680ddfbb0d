// Where weights come from: files, a seed, or a sender. A source lists its tensors and writes their
// bytes into the caller's memory.
//
// The bytes need not have arrived yet. A source whose tensors arrive over time, in any order and in
// pieces, works as follows. It knows all names, types and shapes from the start. Read waits until
// its bytes have arrived. ArrivalOf makes readers ask in the order of arrival, so that the source
// keeps only bytes that arrive before they are asked for. If the sender goes away, Read returns an
// error.
#ifndef ISOBIT_COMMON_CHECKPOINT_TENSOR_SOURCE_H_
#define ISOBIT_COMMON_CHECKPOINT_TENSOR_SOURCE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "common/checkpoint/safetensors.h"

namespace isobit {

// The tensor of that name in `tensors`, which are sorted by name; null if there is none.
inline const Tensor* FindTensor(const std::vector<Tensor>& tensors, absl::string_view name) {
  const auto it =
      std::lower_bound(tensors.begin(), tensors.end(), name,
                       [](const Tensor& tensor, absl::string_view n) { return tensor.name < n; });
  return it != tensors.end() && it->name == name ? &*it : nullptr;
}

class TensorSource {
 public:
  virtual ~TensorSource() = default;

  // Sorted by name, without data.
  const std::vector<Tensor>& tensors() const { return tensors_; }
  const Tensor* Find(absl::string_view name) const { return FindTensor(tensors_, name); }

  // Writes the bytes [first, first + size) of tensors()[tensor] to `out`; both are multiples of the
  // element's size. WeightReader asks for each byte once, and for those of a tensor in order. May
  // wait until the bytes are there. Thread-safe; several tensors may be read at once.
  virtual absl::Status Read(size_t tensor, size_t first, size_t size, uint8_t* out) const = 0;

  // The tensor's rank in the order of arrival; smaller numbers arrive earlier. PackModel asks for
  // the tensors of a block after those of all blocks that are complete before it
  // (PackModelTest.TensorsMayArriveInPiecesAndInAnyOrder).
  virtual size_t ArrivalOf(size_t /*tensor*/) const { return 0; }

  // Call it after the last Read. An error: the source has changed since it was opened, so that the
  // bytes read may be a mixture.
  virtual absl::Status CheckUnchanged() const { return absl::OkStatus(); }

  // The digest, if it follows from the source's definition, such as a seed, so that nothing needs
  // to be hashed. Empty: the digest is that of the bytes.
  virtual std::string known_digest() const { return ""; }

 protected:
  TensorSource() = default;
  TensorSource(TensorSource&&) = default;
  TensorSource& operator=(TensorSource&&) = default;

  std::vector<Tensor> tensors_;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_TENSOR_SOURCE_H_
