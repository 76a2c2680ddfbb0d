// Host memory, and pages that are given back and taken again.
#include "kernels/host_device.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"

namespace isobit {
namespace {

absl::Status NoMemory(size_t bytes) {
  return absl::ResourceExhaustedError(absl::StrCat("no memory for ", bytes, " bytes"));
}

// A range of addresses. While it is released, reading and writing it fault.
class HostPages final : public ReleasableMemory {
 public:
  static absl::StatusOr<std::unique_ptr<ReleasableMemory>> Create(size_t bytes) {
    std::unique_ptr<HostPages> pages(new HostPages);
    void* const address = Reserve(nullptr, std::max<size_t>(bytes, 1), 0);
    if (address == MAP_FAILED) return NoMemory(bytes);
    pages->address_ = static_cast<std::byte*>(address);
    pages->bytes_ = bytes;
    ISOBIT_RETURN_IF_ERROR(pages->Restore());
    return pages;
  }
  ~HostPages() override {
    if (address_ != nullptr) munmap(address_, std::max<size_t>(bytes_, 1));
  }

  absl::Status Release() override {
    if (bytes_ > 0 && Reserve(address_, bytes_, MAP_FIXED) == MAP_FAILED) return NoMemory(bytes_);
    released_ = true;
    return absl::OkStatus();
  }
  absl::Status Restore() override {
    if (bytes_ > 0 && mprotect(address_, bytes_, PROT_READ | PROT_WRITE) != 0) {
      return NoMemory(bytes_);
    }
    released_ = false;
    return absl::OkStatus();
  }

 private:
  HostPages() = default;
  static void* Reserve(void* at, size_t bytes, int flags) {
    return mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
  }
};

}  // namespace

absl::StatusOr<Memory> HostDevice::Allocate(size_t bytes) {
  constexpr size_t kAlignment = 256;
  const size_t rounded = std::max(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded));
  if (memory == nullptr) return NoMemory(rounded);
  return Memory(memory, [](std::byte* p) { std::free(p); });
}

absl::StatusOr<std::unique_ptr<ReleasableMemory>> HostDevice::AllocateReleasable(size_t bytes) {
  return HostPages::Create(bytes);
}

absl::StatusOr<std::unique_ptr<DevicePacker>> HostDevice::MakePacker() {
  return absl::UnimplementedError(
      "this service computes on CPUs (--backend=cpu): expected weights from a directory or by "
      "stream, got some in a GPU's memory");
}

absl::Status HostDevice::Copy(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memmove(to, from, bytes);  // the pointers of an empty copy may be null
  return absl::OkStatus();
}

}  // namespace isobit
