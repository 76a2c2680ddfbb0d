// Command lines of the service binaries: ABSL_FLAG definitions, parsed strictly. A binary defines
// its flags, calls ParseFlagsOrExit first thing in main, and checks their ranges into one const
// struct.
#ifndef ISOBIT_COMMON_CONFIG_FLAGS_H_
#define ISOBIT_COMMON_CONFIG_FLAGS_H_

#include <string>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace isobit {

// Sets the flags that argv[1..] names: --name=value, --name value, --name and --noname for a bool.
// Returns true if --help or -h is among them; the rest then does not matter. INVALID_ARGUMENT: a
// flag is unknown (with the one that may have been meant), its value is malformed or missing, or an
// argument is no flag.
absl::StatusOr<bool> ParseFlags(int argc, const char* const* argv);

// One paragraph for each flag: its name, default and help, sorted by name.
std::string FlagsHelp();

// The name of the program at this path, and its version.
std::string VersionOf(absl::string_view program);

// Prints to stderr what is wrong with the command line, and exits with kExitBadUsage.
[[noreturn]] void ExitForBadUsage(const char* program, absl::string_view message);

// ParseFlags for main. On --help prints `usage` and the flags to stdout, on --version VersionOf;
// both exit with 0. On an error calls ExitForBadUsage.
void ParseFlagsOrExit(int argc, const char* const* argv, const std::string& usage);

// INVALID_ARGUMENT, naming flag and bounds, unless low <= value <= high. A NaN fails.
template <class T>
absl::Status RequireInRange(const char* name, T value, std::type_identity_t<T> low,
                            std::type_identity_t<T> high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", name, " is ", value, ", expected ", low, " to ", high));
}

}  // namespace isobit

#endif  // ISOBIT_COMMON_CONFIG_FLAGS_H_
