// The common part of all services' main functions: prepare the process, read the command line,
// serve, and end with an exit code that has the same meaning everywhere.
//
//   int main(int argc, char** argv) {
//     return isobit::ServiceMain(argc, argv, kUsage, &isobit::SettingsFromFlags, &isobit::Serve);
//   }
#ifndef ISOBIT_COMMON_RPC_SERVICE_MAIN_H_
#define ISOBIT_COMMON_RPC_SERVICE_MAIN_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/exit_code.h"
#include "common/config/flags.h"

namespace isobit {

// For any long-running process of ours, first in main. A slow, stopped or absent reader of stderr
// or stdout then neither blocks nor ends the process. gRPC's messages go to our log.
void PrepareOutput();

// Sets up signals, output and allocator before any thread exists, then parses the flags. `usage`:
// for --help.
void PrepareProcess(int argc, const char* const* argv, const std::string& usage);

// Logs why the service could not start, and returns kExitFailed. After RESOURCE_EXHAUSTED it ends
// the process at once instead: gRPC's shutdown would wait forever for a thread that could not
// start.
int FailToStart(const absl::Status& error);

// read_settings: checks the flags without reading the model; after an error the process ends with
// kExitBadUsage. serve: returns ServerRunner::Wait's exit code, or the reason why the service could
// not start; the process then ends with kExitFailed.
template <typename Settings>
int ServiceMain(int argc, const char* const* argv, const std::string& usage,
                absl::StatusOr<Settings> (*read_settings)(),
                absl::StatusOr<int> (*serve)(const Settings&)) {
  PrepareProcess(argc, argv, usage);
  const absl::StatusOr<Settings> settings = read_settings();
  if (!settings.ok()) ExitForBadUsage(argv[0], settings.status().message());
  const absl::StatusOr<int> exit_code = serve(*settings);
  return exit_code.ok() ? *exit_code : FailToStart(exit_code.status());
}

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_SERVICE_MAIN_H_
