// What a fuzzing target promises of the code under test; a broken promise ends the program, so that
// the fuzzer keeps the input.
#ifndef ISOBIT_TESTS_FUZZ_FUZZ_CHECK_H_
#define ISOBIT_TESTS_FUZZ_FUZZ_CHECK_H_

#include "absl/status/status.h"
#include "common/base/check.h"

namespace isobit::fuzz {

// A refusal must say why, and be the sender's fault, not ours.
inline void CheckRefusal(const absl::Status& status) {
  ISOBIT_CHECK(!status.message().empty());
  ISOBIT_CHECK(absl::IsInvalidArgument(status) || absl::IsNotFound(status) ||
               absl::IsFailedPrecondition(status))
      << status.ToString();
}

}  // namespace isobit::fuzz

#endif  // ISOBIT_TESTS_FUZZ_FUZZ_CHECK_H_
