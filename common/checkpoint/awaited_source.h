// Weights that are read only as long as somebody waits for them.
#ifndef ISOBIT_COMMON_CHECKPOINT_AWAITED_SOURCE_H_
#define ISOBIT_COMMON_CHECKPOINT_AWAITED_SOURCE_H_

#include <functional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "common/checkpoint/tensor_source.h"

namespace isobit {

// INVARIANT: nothing is read of the source once the caller has gone
// (WeightReaderTest.ReadingStopsWhenTheCallerHasGone).
class AwaitedSource final : public TensorSource {
 public:
  // is_abandoned: whether the caller has gone; thread safe; null: never. `source` outlives the
  // object.
  AwaitedSource(const TensorSource& source, std::function<bool()> is_abandoned)
      : source_(source), is_abandoned_(std::move(is_abandoned)) {
    tensors_ = source.tensors();
  }

  // CANCELLED: the caller has gone.
  absl::Status Read(size_t tensor, size_t first, size_t size, uint8_t* out) const override {
    if (is_abandoned_ && is_abandoned_()) {
      return absl::CancelledError("the caller of the weight update has gone");
    }
    return source_.Read(tensor, first, size, out);
  }
  absl::Status CheckUnchanged() const override { return source_.CheckUnchanged(); }
  std::string known_digest() const override { return source_.known_digest(); }

 private:
  const TensorSource& source_;
  const std::function<bool()> is_abandoned_;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_AWAITED_SOURCE_H_
