// The numerics fingerprint: two services whose fingerprints differ do not compute the same function
// and must not be compared.
#ifndef ISOBIT_KERNELS_CONTRACT_FINGERPRINT_H_
#define ISOBIT_KERNELS_CONTRACT_FINGERPRINT_H_

#include <string>

#include "absl/strings/string_view.h"

namespace isobit::contract {

// SHA-256 (64 hex digits) over the contract version and constants, what the contract's functions
// return on fixed probes (so that a changed coefficient or a miscompiled build shows), the numerics
// mode and the model's numeric fields. `mode` and `model` are canonical texts: the same numerics
// must give the same text.
std::string Fingerprint(absl::string_view mode, absl::string_view model);

}  // namespace isobit::contract

#endif  // ISOBIT_KERNELS_CONTRACT_FINGERPRINT_H_
