// The comparator process: isobit-comparator.
#include <cstdint>
#include <memory>
#include <string>

#include "absl/flags/flag.h"
#include "common/base/allocator.h"
#include "common/base/exhaustion.h"
#include "common/base/log.h"
#include "common/config/flags.h"
#include "common/rpc/channel_flags.h"
#include "common/rpc/held_bytes.h"
#include "common/rpc/server_flags.h"
#include "common/rpc/server_runner.h"
#include "trainer_bridge/comparator/comparator_service.h"

ABSL_FLAG(std::string, rollout, "127.0.0.1:50051", "Address of the rollout service.");
ABSL_FLAG(std::string, scorer, "127.0.0.1:50052", "Address of the scorer service.");
ABSL_FLAG(int64_t, max_calls_mb, 1024,
          "Memory of Compare and Record calls, in MiB: of requests, and of tokens that are to be "
          "compared or reported; what needs more ends with RESOURCE_EXHAUSTED.");
ABSL_FLAG(double, max_client_share, 0.5, "Part of --max_calls_mb that one client may take.");

namespace isobit {
namespace {

int Run() {
  const absl::StatusOr<ServerOptions> server = ServerOptionsFromFlags();
  const absl::StatusOr<ChannelSecurity> upstream = ChannelSecurityFromFlags();
  const absl::StatusOr<ByteLimits> memory = ByteLimitsOf(
      "max_calls_mb", absl::GetFlag(FLAGS_max_calls_mb), absl::GetFlag(FLAGS_max_client_share));
  for (const absl::Status& status : {server.status(), upstream.status(), memory.status()}) {
    if (status.ok()) continue;
    ISOBIT_LOG(Error) << status.message();
    return 2;
  }
  ComparatorService service(std::make_shared<Upstreams>(absl::GetFlag(FLAGS_rollout),
                                                        absl::GetFlag(FLAGS_scorer), *upstream),
                            *memory, server->security.gate);
  ServerRunner runner(*server);
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
  isobit::ExitWhenExhausted();
  isobit::ReturnLargeBlocksWhenFreed();
  isobit::ServerRunner::BlockStopSignals();  // before gRPC starts threads
  isobit::ParseFlagsOrExit(
      argc, argv,
      "isobit-comparator: compares a rollout service's logprobs with a scorer's, bit by bit.\n"
      "  isobit-comparator --rollout=HOST:PORT --scorer=HOST:PORT [--host=IP] [--port=N]");
  return isobit::Run();
}
