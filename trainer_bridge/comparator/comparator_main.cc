// The comparator process: isobit-comparator.
#include <memory>
#include <string>

#include "absl/flags/flag.h"
#include "common/base/status_macros.h"
#include "common/http/metrics_page.h"
#include "common/rpc/calls_memory_flag.h"
#include "common/rpc/channel_flags.h"
#include "common/rpc/held_bytes.h"
#include "common/rpc/server_flags.h"
#include "common/rpc/server_runner.h"
#include "common/rpc/service_main.h"
#include "trainer_bridge/comparator/comparator_service.h"

ABSL_FLAG(std::string, rollout, "127.0.0.1:50051", "Address of the rollout service.");
ABSL_FLAG(std::string, scorer, "127.0.0.1:50052", "Address of the scorer service.");

namespace isobit {
namespace {

constexpr char kUsage[] =
    "isobit-comparator: compares a rollout service's logprobs with a scorer's, bit by bit.\n"
    "  isobit-comparator --rollout=HOST:PORT --scorer=HOST:PORT [--host=IP] [--port=N]";

struct Settings {
  ServerOptions server;
  ChannelSecurity upstream;
  ByteLimits memory;
};

absl::StatusOr<Settings> SettingsFromFlags() {
  ISOBIT_ASSIGN_OR_RETURN(const ServerOptions server, ServerOptionsFromFlags());
  ISOBIT_ASSIGN_OR_RETURN(const ChannelSecurity upstream, ChannelSecurityFromFlags());
  ISOBIT_ASSIGN_OR_RETURN(const ByteLimits memory, CallsMemoryFromFlags());
  return Settings{server, upstream, memory};
}

absl::StatusOr<int> Serve(const Settings& settings) {
  ComparatorService service(
      std::make_shared<Upstreams>(absl::GetFlag(FLAGS_rollout), absl::GetFlag(FLAGS_scorer),
                                  settings.upstream),
      settings.memory, settings.server.security.gate, settings.server.metrics);
  if (settings.server.metrics_port) service.WatchSides();
  ServerRunner runner(settings.server);
  runner.Register(&service, v1::ComparatorService::service_full_name());
  ISOBIT_ASSIGN_OR_RETURN(const std::unique_ptr<HttpServer> metrics_page,
                          ServeMetrics(settings.server));
  ISOBIT_RETURN_IF_ERROR(runner.Start());
  runner.SetServing(true);
  return runner.Wait([&service] { service.BeginDrain(); });
}

}  // namespace
}  // namespace isobit

int main(int argc, char** argv) {
  return isobit::ServiceMain(argc, argv, isobit::kUsage, &isobit::SettingsFromFlags,
                             &isobit::Serve);
}
