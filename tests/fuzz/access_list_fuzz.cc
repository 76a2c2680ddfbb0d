// Fuzzes the reader of access files. What it accepts must answer for any token.
#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "common/access/access_list.h"
#include "common/base/check.h"
#include "tests/fuzz/fuzz_check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const auto list = isobit::AccessList::Parse(text, "input");
  if (!list.ok()) {
    isobit::fuzz::CheckRefusal(list.status());
  } else {
    list->ByToken(text);
    ISOBIT_CHECK(list->ByCertificate({}) == nullptr);
  }
  return 0;
}
