// See service_main.h.
#include "common/rpc/service_main.h"

#include <cstdlib>

#include "common/base/allocator.h"
#include "common/base/exhaustion.h"
#include "common/base/log.h"
#include "common/rpc/server_runner.h"

namespace isobit {

void PrepareProcess(int argc, const char* const* argv, const std::string& usage) {
  ExitWhenExhausted();
  ReturnLargeBlocksWhenFreed();
  ServerRunner::BlockStopSignals();  // before gRPC starts threads
  ParseFlagsOrExit(argc, argv, usage);
}

int FailToStart(const absl::Status& error) {
  ISOBIT_LOG(Error) << "cannot start: " << error.ToString();
  if (absl::IsResourceExhausted(error)) std::_Exit(kExitFailed);
  return kExitFailed;
}

}  // namespace isobit
