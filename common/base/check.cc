// The failing path of ISOBIT_CHECK.
#include "common/base/check.h"

#include <cstdlib>
#include <string>

#include "common/base/log.h"

namespace isobit::internal {

CheckFailure::CheckFailure(const char* file, int line, const char* condition) {
  message_ << file << ":" << line << ": check failed: " << condition << " ";
}

CheckFailure::~CheckFailure() {
  LastWords(message_.str() + "\n");
  std::abort();
}

}  // namespace isobit::internal
