// Fuzzes the reader of pickled NCCL ids. What it accepts must hold the id that it gives, and no
// part of it may be accepted.
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/check.h"
#include "common/parallel/pickled_nccl_id.h"
#include "tests/fuzz/fuzz_check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view pickle(reinterpret_cast<const char*>(data), size);
  const auto id = isobit::UnpickleNcclId(pickle);
  if (!id.ok()) {
    isobit::fuzz::CheckRefusal(id.status());
    return 0;
  }
  ISOBIT_CHECK(id->size() == isobit::kNcclIdBytes);
  ISOBIT_CHECK(pickle.find(*id) != absl::string_view::npos);
  ISOBIT_CHECK(!isobit::UnpickleNcclId(pickle.substr(0, size - 1)).ok());
  ISOBIT_CHECK(!isobit::UnpickleNcclId(absl::StrCat(pickle, ".")).ok());
  return 0;
}
