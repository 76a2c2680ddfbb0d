// Fuzzes the reader of one safetensors file. What it accepts must lie within the file.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/base/check.h"
#include "common/checkpoint/safetensors.h"
#include "tests/fuzz/fuzz_check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto tensors = isobit::ParseSafetensors(data, size, "input");
  if (!tensors.ok()) {
    isobit::fuzz::CheckRefusal(tensors.status());
    return 0;
  }
  for (const isobit::Tensor& tensor : *tensors) {
    ISOBIT_CHECK(tensor.size_bytes == 0 ||
                 (tensor.data >= data && tensor.data + tensor.size_bytes <= data + size));
    isobit::TensorDigest(tensor);
    std::vector<uint16_t> elements(std::min<size_t>(tensor.NumElements(), 4096));
    tensor.ToBf16(0, elements.size(), elements.data());
  }
  return 0;
}
