// CUDA events around the parts of a rank's steps: where a step ends, and how long its parts took on
// the GPU. They lie between launches, in the order of the stream, so that nothing waits for them.
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

// Of steps in flight up to a depth. On the rank's thread, its device current.
class StepEvents {
 public:
  // timed: whether parts are timed; otherwise there is an event at each step's end alone.
  static absl::StatusOr<std::unique_ptr<StepEvents>> Create(size_t depth, bool timed);
  StepEvents(const StepEvents&) = delete;
  StepEvents& operator=(const StepEvents&) = delete;
  ~StepEvents();

  // The stream has got the step's ids and tables; its first kernel comes next.
  absl::Status BeginForward(cudaStream_t stream);
  // The stream has got the kernels up to the logits.
  absl::Status BeginDraw(cudaStream_t stream);
  // The stream has got all of the step.
  absl::Status End(cudaStream_t stream);

  // The end of the oldest step that has not been taken.
  cudaEvent_t oldest_end() const { return SlotOf(num_taken_).end; }
  // The parts' times of that step, whose end the caller has waited for. Zeros unless timed.
  absl::StatusOr<DeviceTimes> Take();

 private:
  struct Slot {
    cudaEvent_t begin = nullptr;  // null unless timed
    cudaEvent_t logits = nullptr;
    cudaEvent_t end = nullptr;
  };

  explicit StepEvents(size_t depth) : slots_(depth) {}
  const Slot& SlotOf(size_t step) const { return slots_[step % slots_.size()]; }

  std::vector<Slot> slots_;  // in turn
  size_t num_launched_ = 0;
  size_t num_taken_ = 0;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_STEP_EVENTS_H_
