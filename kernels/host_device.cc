// See host_device.h.
#include "kernels/host_device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace isobit {

absl::StatusOr<Memory> HostDevice::Allocate(size_t bytes) {
  constexpr size_t kAlignment = 256;
  const size_t rounded = std::max(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded));
  if (memory == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("no memory for ", rounded, " bytes"));
  }
  return Memory(memory, [](std::byte* p) { std::free(p); });
}

absl::Status HostDevice::Copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memmove(to, from, bytes);  // the pointers of an empty copy may be null
  return absl::OkStatus();
}

}  // namespace isobit
