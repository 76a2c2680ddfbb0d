// Signals, output, allocator and flags, in the order that a process needs.
#include "common/rpc/service_main.h"

#include <fcntl.h>
#include <grpc/support/log.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>

#include "common/base/allocator.h"
#include "common/base/exhaustion.h"
#include "common/base/log.h"
#include "common/base/stdout_pump.h"
#include "common/rpc/server_runner.h"

namespace isobit {
namespace {

void LogForGrpc(gpr_log_func_args* args) {
  const LogLevel level =
      args->severity == GPR_LOG_SEVERITY_ERROR ? LogLevel::kError : LogLevel::kInfo;
  internal::LogMessage(level, args->file, args->line).stream() << args->message;
}

}  // namespace

void PrepareOutput() {
  // A descriptor that was closed would become some socket's, and get the log.
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(fd, F_GETFD) >= 0) continue;
    const int nowhere = open("/dev/null", O_RDWR);
    if (nowhere != fd && dup2(nowhere, fd) >= 0) close(nowhere);
  }
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);  // a log at its limit (ulimit -f)
  gpr_set_log_function(&LogForGrpc);
  PumpStdout();
}

void PrepareProcess(int argc, const char* const* argv, const std::string& usage) {
  ExitWhenExhausted();
  ReturnLargeBlocksWhenFreed();
  ServerRunner::BlockStopSignals();     // before gRPC starts threads
  ParseFlagsOrExit(argc, argv, usage);  // which may print to stdout as it is, and exit
  PrepareOutput();
}

int FailToStart(const absl::Status& error) {
  ISOBIT_LOG(Error) << "cannot start: " << error.ToString();
  if (absl::IsResourceExhausted(error)) {
    FlushLog();
    std::_Exit(kExitFailed);
  }
  return kExitFailed;
}

}  // namespace isobit
