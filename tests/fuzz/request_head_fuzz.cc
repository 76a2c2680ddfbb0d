// Fuzzes the reader of HTTP requests. What it accepts must be read the same when it is read again.
#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "common/base/check.h"
#include "common/http/request_head.h"
#include "tests/fuzz/fuzz_check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const size_t head_size = isobit::HeadSize(text);
  if (head_size == 0) return 0;
  const auto head = isobit::ParseRequestHead(text.substr(0, head_size));
  if (!head.ok()) {
    isobit::fuzz::CheckRefusal(head.status());
    return 0;
  }
  isobit::HostNames({"name"}).Allow(head->host);
  ISOBIT_CHECK(isobit::HeadSize(head->text) == head->text.size());
  const auto again = isobit::ParseRequestHead(head->text);
  ISOBIT_CHECK(again.ok() && again->text == head->text && again->host == head->host);
  return 0;
}
