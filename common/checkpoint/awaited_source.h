// Weights that are read only while their caller waits for them.
#ifndef ISOBIT_COMMON_CHECKPOINT_AWAITED_SOURCE_H_
#define ISOBIT_COMMON_CHECKPOINT_AWAITED_SOURCE_H_

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "common/base/awaited.h"
#include "common/base/status_macros.h"
#include "common/checkpoint/tensor_source.h"

namespace isobit {

// INVARIANT: the source is not read any more once the caller has gone
// (WeightReaderTest.ReadingStopsWhenTheCallerHasGone).
class AwaitedSource final : public TensorSource {
 public:
  // `source` outlives the object.
  AwaitedSource(const TensorSource& source, IsAbandoned is_abandoned)
      : source_(source), is_abandoned_(std::move(is_abandoned)) {
    tensors_ = source.tensors();
  }

  // CANCELLED: the caller has gone.
  absl::Status Read(size_t tensor, size_t first, size_t size, uint8_t* out) const override {
    ISOBIT_RETURN_IF_ERROR(CheckAwaited(is_abandoned_, "weight update"));
    return source_.Read(tensor, first, size, out);
  }
  size_t ArrivalOf(size_t tensor) const override { return source_.ArrivalOf(tensor); }
  absl::Status CheckUnchanged() const override { return source_.CheckUnchanged(); }
  std::string known_digest() const override { return source_.known_digest(); }

 private:
  const TensorSource& source_;
  const IsAbandoned is_abandoned_;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_CHECKPOINT_AWAITED_SOURCE_H_
