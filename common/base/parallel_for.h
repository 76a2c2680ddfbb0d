// A loop over few, long items on its own threads: for loading and hashing. Not for the engine's
// steps, which have permanent threads.
#ifndef ISOBIT_COMMON_BASE_PARALLEL_FOR_H_
#define ISOBIT_COMMON_BASE_PARALLEL_FOR_H_

#include <cstddef>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace isobit {

// Calls body(item, worker) for each item in [0, count); items start in this order. Uses at most
// `max_workers` threads, including the caller's, and no more than the machine has cores; worker is
// in [0, max_workers). After the first error no further item starts, and that error is returned.
absl::Status ParallelFor(size_t count, size_t max_workers,
                         absl::FunctionRef<absl::Status(size_t item, size_t worker)> body);

}  // namespace isobit

#endif  // ISOBIT_COMMON_BASE_PARALLEL_FOR_H_
