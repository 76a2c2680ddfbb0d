// CUDA events around the parts of a rank's steps: when a step ends, and how long its parts took on
// the GPU. They are recorded between launches, in stream order, so nothing waits for them.
#ifndef ISOBIT_KERNELS_RUNTIME_STEP_EVENTS_H_
#define ISOBIT_KERNELS_RUNTIME_STEP_EVENTS_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/runtime/rank_executor.h"

namespace isobit {

// For as many steps in flight as `depth` says. Used on the rank's thread, with its device current.
class StepEvents {
 public:
  // timed: whether parts are timed; otherwise there is only an event at the end of each step.
  static absl::StatusOr<std::unique_ptr<StepEvents>> Create(size_t depth, bool timed);
  StepEvents(const StepEvents&) = delete;
  StepEvents& operator=(const StepEvents&) = delete;
  ~StepEvents();

  // Call when the step's ids and tables are on the stream, before its first kernel.
  absl::Status BeginForward(cudaStream_t stream);
  // Call when the kernels up to the logits are on the stream.
  absl::Status BeginDraw(cudaStream_t stream);
  // Call when the whole step is on the stream.
  absl::Status End(cudaStream_t stream);

  // The end of the oldest step that has not been taken.
  cudaEvent_t oldest_end() const { return SlotOf(num_taken_).end; }
  // The times of that step's parts. The caller has waited for its end. Zeros unless timed.
  absl::StatusOr<DeviceTimes> Take();

 private:
  struct Slot {
    cudaEvent_t begin = nullptr;  // null unless timed
    cudaEvent_t logits = nullptr;
    cudaEvent_t end = nullptr;
  };

  explicit StepEvents(size_t depth) : slots_(depth) {}
  const Slot& SlotOf(size_t step) const { return slots_[step % slots_.size()]; }

  std::vector<Slot> slots_;  // used in turn
  size_t num_launched_ = 0;
  size_t num_taken_ = 0;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_STEP_EVENTS_H_
