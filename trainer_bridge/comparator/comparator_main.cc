// The comparator process: isobit-comparator.
#include <memory>
#include <string>

#include "absl/flags/flag.h"
#include "common/base/log.h"
#include "common/config/flags.h"
#include "common/rpc/server_flags.h"
#include "common/rpc/server_runner.h"
#include "trainer_bridge/comparator/comparator_service.h"

ABSL_FLAG(std::string, rollout, "127.0.0.1:50051", "Address of the rollout service.");
ABSL_FLAG(std::string, scorer, "127.0.0.1:50052", "Address of the scorer service.");

namespace isobit {
namespace {

int Run() {
  ComparatorService service(
      std::make_shared<Upstreams>(absl::GetFlag(FLAGS_rollout), absl::GetFlag(FLAGS_scorer)));
  ServerRunner runner(ServerOptionsFromFlags());
  runner.Register(&service, v1::ComparatorService::service_full_name());
  if (const absl::Status started = runner.Start(); !started.ok()) {
    ISOBIT_LOG(Error) << started.ToString();
    return 1;
  }
  runner.SetServing(true);
  return runner.Wait([&service] { service.BeginDrain(); });
}

}  // namespace
}  // namespace isobit

int main(int argc, char** argv) {
  isobit::ServerRunner::BlockStopSignals();  // before gRPC starts threads
  isobit::ParseFlagsOrExit(
      argc, argv,
      "isobit-comparator: compares a rollout service's logprobs with a scorer's, bit by bit.\n"
      "  isobit-comparator --rollout=HOST:PORT --scorer=HOST:PORT [--host=IP] [--port=N]");
  return isobit::Run();
}
