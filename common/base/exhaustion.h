// What a process does when the system has no memory or no thread for it.
#ifndef ISOBIT_COMMON_BASE_EXHAUSTION_H_
#define ISOBIT_COMMON_BASE_EXHAUSTION_H_

#include "absl/status/status.h"

namespace isobit {

// For main, before threads start: std::bad_alloc, and the std::system_error of a thread that cannot
// be started, are said on stderr, in whatever thread they come, and end the process with exit code
// 1. Otherwise they abort it, as other exceptions do.
void ExitWhenExhausted();

// RESOURCE_EXHAUSTED unless `count` threads can be started beside those there are. For before a
// library starts its own: gRPC aborts, or hangs, when it cannot.
absl::Status CheckThreadsCanStart(int count);

}  // namespace isobit

#endif  // ISOBIT_COMMON_BASE_EXHAUSTION_H_
