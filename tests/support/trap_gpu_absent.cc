// Of a build without CUDA: the failure is an error alone.
#include "tests/support/trap_gpu.h"

namespace isobit::testing_support {

absl::Status TrapGpu(int /*device*/) { return absl::InternalError("a fault, without a GPU"); }

}  // namespace isobit::testing_support
