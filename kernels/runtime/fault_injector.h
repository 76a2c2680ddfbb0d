// For tests of what follows a GPU error: a rank whose GPU fails in a chosen step.
#ifndef ISOBIT_KERNELS_RUNTIME_FAULT_INJECTOR_H_
#define ISOBIT_KERNELS_RUNTIME_FAULT_INJECTOR_H_

#include <cstdint>

#include "kernels/runtime/rank_executor.h"

namespace isobit {

struct InjectedFault {
  int rank = -1;     // -1: none
  int64_t step = 0;  // counted from 0 at the rank's start
  int device = 0;    // of that rank
};

// Makes ranks by `make_rank`, and wraps the faulty one in a decorator.
MakeRank WithFault(MakeRank make_rank, const InjectedFault& fault);

}  // namespace isobit

#endif  // ISOBIT_KERNELS_RUNTIME_FAULT_INJECTOR_H_
