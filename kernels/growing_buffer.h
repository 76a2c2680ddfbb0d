// Device memory that grows on demand and never shrinks.
#ifndef ISOBIT_KERNELS_GROWING_BUFFER_H_
#define ISOBIT_KERNELS_GROWING_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device.h"

namespace isobit {

template <typename T>
class GrowingBuffer {
 public:
  // Makes room for `elements` elements. If the memory has to grow, its contents are lost.
  // RESOURCE_EXHAUSTED: there is too little memory.
  absl::Status Reserve(Device& device, int64_t elements) {
    const size_t bytes = static_cast<size_t>(elements) * sizeof(T);
    if (memory_ != nullptr && bytes <= bytes_) return absl::OkStatus();
    memory_ = nullptr;  // freed before its successor is allocated
    bytes_ = 0;
    absl::StatusOr<Memory> memory = device.Allocate(bytes);
    if (!memory.ok()) return memory.status();
    memory_ = *std::move(memory);
    bytes_ = bytes;
    return absl::OkStatus();
  }

  T* data() const { return reinterpret_cast<T*>(memory_.get()); }

 private:
  Memory memory_;
  size_t bytes_ = 0;
};

}  // namespace isobit

#endif  // ISOBIT_KERNELS_GROWING_BUFFER_H_
