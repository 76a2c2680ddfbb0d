// Checks of fuzzing targets. One that fails ends the program, so that the fuzzer keeps the input.
#ifndef ISOBIT_TESTS_FUZZ_FUZZ_CHECK_H_
#define ISOBIT_TESTS_FUZZ_FUZZ_CHECK_H_

#include "absl/status/status.h"
#include "common/base/check.h"

namespace isobit::fuzz {

// A refusal must have a message, and a code that blames the sender, not us. UNIMPLEMENTED does: the
// sender asked for a method that no page has.
inline void CheckRefusal(const absl::Status& status) {
  ISOBIT_CHECK(!status.message().empty());
  ISOBIT_CHECK(absl::IsInvalidArgument(status) || absl::IsNotFound(status) ||
               absl::IsFailedPrecondition(status) || absl::IsUnimplemented(status))
      << status.ToString();
}

}  // namespace isobit::fuzz

#endif  // ISOBIT_TESTS_FUZZ_FUZZ_CHECK_H_
