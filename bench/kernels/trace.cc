// Collects the buffers that CUPTI fills, and demangles the names of kernels.
#include "bench/kernels/trace.h"

#include <cupti.h>
#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"

namespace isobit::bench {
namespace {

constexpr size_t kBufferBytes = size_t{8} << 20;
constexpr size_t kBufferAlignment = 8;

std::mutex mutex;
std::vector<KernelRecord>* records = nullptr;  // of the current trace

absl::Status Check(CUptiResult result, const char* what) {
  if (result == CUPTI_SUCCESS) return absl::OkStatus();
  const char* text = "unknown";
  cuptiGetResultString(result, &text);
  return absl::InternalError(absl::StrCat(what, ": ", text));
}

std::string Demangle(const char* name) {
  int status = 0;
  char* const plain = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::string result = status == 0 ? plain : name;
  std::free(plain);
  return result;
}

void CUPTIAPI GiveBuffer(uint8_t** buffer, size_t* size, size_t* max_records) {
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(kBufferAlignment, kBufferBytes));
  *size = kBufferBytes;
  *max_records = 0;
}

void CUPTIAPI TakeBuffer(CUcontext /*context*/, uint32_t /*stream*/, uint8_t* buffer,
                         size_t /*size*/, size_t valid_bytes) {
  const std::lock_guard lock(mutex);
  CUpti_Activity* record = nullptr;
  while (cuptiActivityGetNextRecord(buffer, valid_bytes, &record) == CUPTI_SUCCESS) {
    if (record->kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL || records == nullptr) continue;
    const auto& kernel = *reinterpret_cast<const CUpti_ActivityKernel10*>(record);
    records->push_back({Demangle(kernel.name), kernel.deviceId, kernel.start, kernel.end});
  }
  std::free(buffer);
}

}  // namespace

absl::Status StartKernelTrace() {
  {
    const std::lock_guard lock(mutex);
    delete records;
    records = new std::vector<KernelRecord>;
  }
  ISOBIT_RETURN_IF_ERROR(
      Check(cuptiActivityRegisterCallbacks(GiveBuffer, TakeBuffer), "registering with CUPTI"));
  return Check(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL), "tracing kernels");
}

absl::StatusOr<std::vector<KernelRecord>> StopKernelTrace() {
  ISOBIT_RETURN_IF_ERROR(Check(cuptiActivityFlushAll(1), "flushing the kernel trace"));
  ISOBIT_RETURN_IF_ERROR(
      Check(cuptiActivityDisable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL), "ending the trace"));
  ISOBIT_RETURN_IF_ERROR(Check(cuptiFinalize(), "detaching CUPTI"));
  const std::lock_guard lock(mutex);
  std::vector<KernelRecord> result;
  if (records != nullptr) result.swap(*records);
  std::sort(result.begin(), result.end(),
            [](const auto& a, const auto& b) { return a.start_ns < b.start_ns; });
  return result;
}

}  // namespace isobit::bench
