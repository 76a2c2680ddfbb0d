// Fuzzes the reader of config.json and generation_config.json; a zero byte divides the input into
// the two. What it accepts must be a config that we can write and read back.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "common/base/check.h"
#include "common/checkpoint/model_config.h"
#include "tests/fuzz/fuzz_check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const size_t end = std::min(text.find('\0'), text.size());
  const std::string generation_config = end == text.size() ? "" : text.substr(end + 1);
  const auto config = isobit::ParseModelConfig(text.substr(0, end), generation_config);
  if (!config.ok()) {
    isobit::fuzz::CheckRefusal(config.status());
    return 0;
  }
  ISOBIT_CHECK(isobit::ValidateModelConfig(*config).ok());
  ISOBIT_CHECK(!config->CanonicalString().empty());
  for (int layer = 0; layer < config->num_layers; ++layer) {
    ISOBIT_CHECK(config->WindowOfLayer(layer) >= 0);
  }
  return 0;
}
