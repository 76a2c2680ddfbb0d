// The range check and its message.
#include "common/config/token_ids.h"

#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"

namespace isobit {

absl::Status CheckTokenId(absl::string_view field, int32_t id, int32_t vocab_size) {
  if (id >= 0 && id < vocab_size) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, ": expected a token id in [0, ", vocab_size,
                                                 "), got ", static_cast<uint32_t>(id)));
}

absl::Status CheckTokenIds(absl::string_view field, absl::Span<const int32_t> ids,
                           int32_t vocab_size) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && ids[i] < vocab_size) continue;
    return CheckTokenId(absl::StrCat(field, "[", i, "]"), ids[i], vocab_size);
  }
  return absl::OkStatus();
}

}  // namespace isobit
