// The numerics fingerprint: services with different fingerprints compute different functions and
// must not be compared.
#ifndef ISOBIT_KERNELS_CONTRACT_FINGERPRINT_H_
#define ISOBIT_KERNELS_CONTRACT_FINGERPRINT_H_

#include <string>

#include "absl/strings/string_view.h"

namespace isobit::contract {

// SHA-256 (64 hex digits) over the contract version and constants, the results of the contract's
// functions on fixed inputs (which reveals a changed coefficient or a miscompiled build), the
// numerics mode and the model's numeric fields. `mode` and `model` are canonical texts: the same
// numerics must give the same text.
std::string Fingerprint(absl::string_view mode, absl::string_view model);

}  // namespace isobit::contract

#endif  // ISOBIT_KERNELS_CONTRACT_FINGERPRINT_H_
