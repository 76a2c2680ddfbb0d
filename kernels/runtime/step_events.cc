// Three events a step, used in turns.
#include "kernels/runtime/step_events.h"

#include "common/base/status_macros.h"
#include "common/cuda/cuda_status.h"

namespace isobit {
namespace {

absl::StatusOr<double> SecondsBetween(cudaEvent_t begin, cudaEvent_t end) {
  float milliseconds = 0;
  ISOBIT_RETURN_IF_CUDA_ERROR(cudaEventElapsedTime(&milliseconds, begin, end));
  return 1e-3 * static_cast<double>(milliseconds);
}

}  // namespace

absl::StatusOr<std::unique_ptr<StepEvents>> StepEvents::Create(size_t depth, bool timed) {
  std::unique_ptr<StepEvents> events(new StepEvents(depth));
  for (Slot& slot : events->slots_) {
    // The host waits for the end alone, and sleeps meanwhile.
    const unsigned flags = cudaEventBlockingSync | (timed ? 0 : cudaEventDisableTiming);
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaEventCreateWithFlags(&slot.end, flags));
    if (!timed) continue;
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaEventCreate(&slot.begin));
    ISOBIT_RETURN_IF_CUDA_ERROR(cudaEventCreate(&slot.logits));
  }
  return events;
}

StepEvents::~StepEvents() {
  for (const Slot& slot : slots_) {
    for (cudaEvent_t event : {slot.begin, slot.logits, slot.end}) {
      if (event != nullptr) cudaEventDestroy(event);
    }
  }
}

absl::Status StepEvents::BeginForward(cudaStream_t stream) {
  const Slot& slot = SlotOf(num_launched_);
  if (slot.begin == nullptr) return absl::OkStatus();
  return cuda::CudaStatus(cudaEventRecord(slot.begin, stream), "an event at a step's begin");
}

absl::Status StepEvents::BeginDraw(cudaStream_t stream) {
  const Slot& slot = SlotOf(num_launched_);
  if (slot.logits == nullptr) return absl::OkStatus();
  return cuda::CudaStatus(cudaEventRecord(slot.logits, stream), "an event at a step's logits");
}

absl::Status StepEvents::End(cudaStream_t stream) {
  return cuda::CudaStatus(cudaEventRecord(SlotOf(num_launched_++).end, stream),
                          "an event at a step's end");
}

absl::StatusOr<DeviceTimes> StepEvents::Take() {
  const Slot& slot = SlotOf(num_taken_++);
  if (slot.begin == nullptr) return DeviceTimes();
  DeviceTimes times;
  ISOBIT_ASSIGN_OR_RETURN(times.forward, SecondsBetween(slot.begin, slot.logits));
  ISOBIT_ASSIGN_OR_RETURN(times.draw, SecondsBetween(slot.logits, slot.end));
  return times;
}

}  // namespace isobit
