// Fuzzes the reader of one safetensors file. What it accepts must lie within the file.
#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "common/base/check.h"
#include "common/checkpoint/safetensors.h"
#include "tests/fuzz/fuzz_check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view file(reinterpret_cast<const char*>(data), size);
  const auto tensors = isobit::ParseSafetensors(file, size, "input");
  if (!tensors.ok()) {
    isobit::fuzz::CheckRefusal(tensors.status());
    return 0;
  }
  for (const isobit::StoredTensor& stored : *tensors) {
    ISOBIT_CHECK(stored.offset <= size && stored.tensor.size_bytes <= size - stored.offset);
  }
  return 0;
}
