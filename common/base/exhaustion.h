// What a process does when the system runs out of memory or threads.
#ifndef ISOBIT_COMMON_BASE_EXHAUSTION_H_
#define ISOBIT_COMMON_BASE_EXHAUSTION_H_

#include "absl/status/status.h"

namespace isobit {

// For main, before threads start. Afterwards an uncaught std::bad_alloc, or the std::system_error
// of a thread that cannot be started, prints its cause on stderr and ends the process with exit
// code 1, whichever thread throws it. Without this call it aborts the process, as other exceptions
// do.
void ExitWhenExhausted();

// RESOURCE_EXHAUSTED unless `count` more threads can be started now. Call it before a library
// starts its threads: gRPC aborts or hangs if it cannot start them.
absl::Status CheckThreadsCanStart(int count);

}  // namespace isobit

#endif  // ISOBIT_COMMON_BASE_EXHAUSTION_H_
