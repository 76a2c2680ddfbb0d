// Exit codes of a service process, for the program that restarts it (docs/operations.md).
#ifndef ISOBIT_COMMON_BASE_EXIT_CODE_H_
#define ISOBIT_COMMON_BASE_EXIT_CODE_H_

namespace isobit {

enum ExitCode : int {
  kExitStopped = 0,  // it was asked to stop
  kExitFailed = 1,   // it could not start, or failed later
  kExitBadUsage =
      2,  // the command line, or a file that it names, is wrong: a restart does not help
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_BASE_EXIT_CODE_H_
