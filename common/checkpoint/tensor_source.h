// Where weights come from: files, a seed, or what somebody sends. It says which tensors there are,
// and writes their bytes into the caller's memory.
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

// The tensor of that name among `tensors`, which are sorted by name; null when there is none.
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
  // element's size. WeightReader asks for each byte once, in a tensor from the first to the last.
  // May wait until they are there. Thread safe; several tensors are read at one time.
  virtual absl::Status Read(size_t tensor, size_t first, size_t size, uint8_t* out) const = 0;

  // The place of the tensor in the order of arrival: a smaller number arrives earlier. PackModel
  // asks for the tensors of a block after those of all blocks that are complete before it
  // (PackModelTest.TensorsMayArriveInPiecesAndInAnyOrder).
  virtual size_t ArrivalOf(size_t /*tensor*/) const { return 0; }

  // Call it after the last Read. An error if the source was seen to change after it was opened, so
  // that the bytes read may be a mixture.
  virtual absl::Status CheckUnchanged() const { return absl::OkStatus(); }

  // The digest of a source whose bytes follow from its definition, such as a seed, so that nothing
  // needs to be hashed. Empty: the digest is that of the bytes.
  virtual std::string known_digest() const { return ""; }

 protected:
  TensorSource() = default;
  TensorSource(TensorSource&&) = default;
  TensorSource& operator=(TensorSource&&) = default;

  std::vector<Tensor> tensors_;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_TENSOR_SOURCE_H_
