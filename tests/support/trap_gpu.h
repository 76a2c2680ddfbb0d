// Makes a GPU fail, for tests of what follows.
#ifndef ISOBIT_TESTS_SUPPORT_TRAP_GPU_H_
#define ISOBIT_TESTS_SUPPORT_TRAP_GPU_H_

#include "absl/status/status.h"

namespace isobit::testing_support {

// Launches a kernel that ends in a trap. This process cannot use the device afterwards.
absl::Status TrapGpu(int device);

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_SUPPORT_TRAP_GPU_H_
