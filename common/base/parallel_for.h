// A loop over few, long items on threads of its own: loading and hashing. Not for steps of the
// engine, whose threads stay.
#ifndef ISOBIT_COMMON_BASE_PARALLEL_FOR_H_
#define ISOBIT_COMMON_BASE_PARALLEL_FOR_H_

#include <cstddef>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace isobit {

// Calls body(item, worker) for each item in [0, count), in order of start, on at most `max_workers`
// threads, the caller's among them, and no more than the machine has cores; worker is in [0,
// max_workers). The first error to come starts no further item and is returned.
absl::Status ParallelFor(size_t count, size_t max_workers,
                         absl::FunctionRef<absl::Status(size_t item, size_t worker)> body);

}  // namespace isobit

#endif  // ISOBIT_COMMON_BASE_PARALLEL_FOR_H_
