// Token ids: uint32 on the wire, int32 inside the services. The conversion keeps the bits: an id
// above 2^31 - 1 becomes negative, and error messages can still show what was sent.
#ifndef ISOBIT_COMMON_CONFIG_TOKEN_IDS_H_
#define ISOBIT_COMMON_CONFIG_TOKEN_IDS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace isobit {

// Converts a repeated field of uint32, without any check.
template <typename WireIds>
std::vector<int32_t> TokenIdsFromWire(const WireIds& ids) {
  return {ids.begin(), ids.end()};
}

// INVALID_ARGUMENT, naming `field` and what was sent, unless the id is in [0, vocab_size).
absl::Status CheckTokenId(absl::string_view field, int32_t id, int32_t vocab_size);

// Likewise for several ids; the message names field[i].
absl::Status CheckTokenIds(absl::string_view field, absl::Span<const int32_t> ids,
                           int32_t vocab_size);

}  // namespace isobit

#endif  // ISOBIT_COMMON_CONFIG_TOKEN_IDS_H_
