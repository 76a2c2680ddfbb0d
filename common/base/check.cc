// The failing path of ISOBIT_CHECK.
#include "common/base/check.h"

#include <cstdio>
#include <cstdlib>
#include <string>

namespace isobit::internal {

CheckFailure::CheckFailure(const char* file, int line, const char* condition) {
  message_ << file << ":" << line << ": check failed: " << condition << " ";
}

CheckFailure::~CheckFailure() {
  // Not the logger: a check may fail inside it.
  const std::string line = message_.str() + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
  std::abort();
}

}  // namespace isobit::internal
