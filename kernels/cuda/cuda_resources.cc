// Scratch that grows.
#include "kernels/cuda/cuda_resources.h"

#include <algorithm>

#include "common/base/status_macros.h"

namespace isobit {

absl::StatusOr<std::byte*> CudaResources::Scratch(size_t bytes) {
  if (bytes <= scratch_bytes_) return scratch_.get();
  if (scratch_ != nullptr) outgrown_.push_back(std::move(scratch_));
  // Doubling keeps the sum of all outgrown scratch below the size in use.
  scratch_bytes_ = std::max(bytes, 2 * scratch_bytes_);
  absl::StatusOr<Memory> memory = device->Allocate(scratch_bytes_);
  if (!memory.ok()) scratch_bytes_ = 0;
  ISOBIT_ASSIGN_OR_RETURN(scratch_, std::move(memory));
  return scratch_.get();
}

}  // namespace isobit
