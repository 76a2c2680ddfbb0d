// The environment variable that names a failpoint, and what happens there.
#include "common/base/failpoint.h"

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"

namespace isobit {

absl::Status Failpoint(const char* name) {
  static const char* const path = std::getenv("ISOBIT_FAILPOINTS");
  if (path == nullptr) return absl::OkStatus();
  std::ifstream file(path);
  std::string place;
  std::string action;
  while (file >> place >> action) {
    if (place != name) continue;
    if (action == "kill") raise(SIGKILL);
    if (action == "stop") raise(SIGSTOP);
    if (action == "fail") return absl::InternalError(absl::StrCat("failpoint ", name));
  }
  return absl::OkStatus();
}

}  // namespace isobit
