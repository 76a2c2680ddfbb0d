// Named points in the code at which a test can stop, kill or fail a process, to see what remains.
#ifndef ISOBIT_COMMON_BASE_FAILPOINT_H_
#define ISOBIT_COMMON_BASE_FAILPOINT_H_

#include "absl/status/status.h"

namespace isobit {

// The environment variable ISOBIT_FAILPOINTS names a file with lines "name action". If a line has
// this `name`, its action is performed: "kill" and "stop" send the process SIGKILL and SIGSTOP,
// "fail" returns INTERNAL. The file is read at each call, so a test can change it while the process
// runs. If the variable is not set at the first call, each call is a single comparison and returns
// OK. Thread-safe.
absl::Status Failpoint(const char* name);

}  // namespace isobit

#endif  // ISOBIT_COMMON_BASE_FAILPOINT_H_
