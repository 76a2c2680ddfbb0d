// Scratch memory that grows.
#include "kernels/cuda/cuda_resources.h"

#include <algorithm>

#include "common/base/status_macros.h"

namespace isobit {

absl::Status CudaResources::ReserveScratch(size_t bytes) {
  if (bytes <= scratch_bytes) return absl::OkStatus();
  if (scratch != nullptr) outgrown.push_back(std::move(scratch));
  // Doubling keeps the sum of all outgrown scratch below the size in use.
  scratch_bytes = std::max(bytes, 2 * scratch_bytes);
  absl::StatusOr<Memory> memory = device->Allocate(scratch_bytes);
  if (!memory.ok()) scratch_bytes = 0;
  ISOBIT_ASSIGN_OR_RETURN(scratch, std::move(memory));
  return absl::OkStatus();
}

}  // namespace isobit
