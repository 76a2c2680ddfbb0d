// The comparator process: isobit-comparator.
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "common/access/held_bytes.h"
#include "common/base/status_macros.h"
#include "common/config/flags.h"
#include "common/http/metrics_page.h"
#include "common/rpc/calls_memory_flag.h"
#include "common/rpc/channel_flags.h"
#include "common/rpc/port_file.h"
#include "common/rpc/server_flags.h"
#include "common/rpc/server_runner.h"
#include "common/rpc/service_main.h"
#include "trainer_bridge/comparator/comparator_service.h"
#include "trainer_bridge/comparator/page.h"
#include "trainer_bridge/comparator/token_texts.h"

ABSL_FLAG(std::string, rollout, "127.0.0.1:7001", "Address of the rollout service.");
ABSL_FLAG(std::string, scorer, "127.0.0.1:7002", "Address of the scorer service.");

ABSL_FLAG(std::optional<int>, http_port, std::nullopt,
          "A port for HTTP, or HTTPS with --tls_cert, with the live page at / and the metrics at "
          "/metrics; 0 lets the system choose one, which goes to the port file's name with .http "
          "after it.");
ABSL_FLAG(
    double, shadow_fraction, 0,
    "The share of the rollout's own traffic to compare, in [0, 1]: finished samples are scored "
    "again, and nobody waits for it.");
ABSL_FLAG(
    std::string, record_file, "",
    "Writes the compared samples there, for `isobit audit`. A full file gets .1 after its name, "
    "and the one of that name .2.");
ABSL_FLAG(int, record_max_mb, 1024, "Megabytes at which --record_file is full.");
ABSL_FLAG(int, record_old_files, 8, "How many full files are kept; the oldest is then deleted.");
ABSL_FLAG(std::string, tokenizer, "",
          "A tokenizer.json of Hugging Face: the live page then shows the texts of tokens.");

namespace isobit {
namespace {

constexpr char kUsage[] =
    "isobit-comparator: compares a rollout service's logprobs with a scorer's, bit by bit.\n"
    "  isobit-comparator --rollout=HOST:PORT --scorer=HOST:PORT [--host=IP] [--port=N]";

constexpr char kHttpSuffix[] = ".http";  // after the name of the port file

struct Settings {
  ServerOptions server;
  ChannelSecurity upstream;
  ByteLimits memory;
  std::optional<int> http_port;
  double shadow_fraction;
  RecordingOptions recording;  // path empty: none
  std::shared_ptr<const TokenTexts> texts;
};

absl::StatusOr<Settings> SettingsFromFlags() {
  ISOBIT_ASSIGN_OR_RETURN(const ServerOptions server, ServerOptionsFromFlags());
  ISOBIT_ASSIGN_OR_RETURN(const ChannelSecurity upstream, ChannelSecurityFromFlags());
  ISOBIT_ASSIGN_OR_RETURN(const ByteLimits memory, CallsMemoryFromFlags());
  const std::optional<int> http_port = absl::GetFlag(FLAGS_http_port);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("http_port", http_port.value_or(0), 0, 65535));
  if (http_port && !server.port_file.empty()) {
    ISOBIT_RETURN_IF_ERROR(CheckPortFile(absl::StrCat(server.port_file, kHttpSuffix)));
  }
  TokenTexts texts;
  if (const std::string path = absl::GetFlag(FLAGS_tokenizer); !path.empty()) {
    ISOBIT_ASSIGN_OR_RETURN(texts, TokenTexts::Read(path));
  }
  const double shadow_fraction = absl::GetFlag(FLAGS_shadow_fraction);
  if (!(shadow_fraction >= 0 && shadow_fraction <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--shadow_fraction is ", shadow_fraction, ", expected 0 to 1"));
  }
  const int record_max_mb = absl::GetFlag(FLAGS_record_max_mb);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("record_max_mb", record_max_mb, 1, 1 << 20));
  const int record_old_files = absl::GetFlag(FLAGS_record_old_files);
  ISOBIT_RETURN_IF_ERROR(RequireInRange("record_old_files", record_old_files, 1, 1000));
  RecordingOptions recording;
  recording.path = absl::GetFlag(FLAGS_record_file);
  recording.max_file_bytes = static_cast<size_t>(record_max_mb) << 20;
  recording.max_old_files = record_old_files;
  return Settings{.server = server,
                  .upstream = upstream,
                  .memory = memory,
                  .http_port = http_port,
                  .shadow_fraction = shadow_fraction,
                  .recording = recording,
                  .texts = std::make_shared<const TokenTexts>(std::move(texts))};
}

// Null: --http_port asks for none.
absl::StatusOr<std::unique_ptr<HttpServer>> ServePage(const Settings& settings,
                                                      const ComparatorService& service,
                                                      ServerRunner& runner) {
  if (!settings.http_port) return nullptr;
  const ServerOptions& options = settings.server;
  ISOBIT_ASSIGN_OR_RETURN(std::unique_ptr<HttpServer> server,
                          HttpServer::Listen({.host = options.host,
                                              .port = *settings.http_port,
                                              .tls = options.security.tls,
                                              .gate = options.security.gate,
                                              .host_names = options.http_hosts}));
  AddMetricsPage(*server, options.metrics);
  AddHealthPages(*server, runner);
  AddPage(*server, service.history(), service.side_watch(), settings.texts);
  server->Start();
  ISOBIT_RETURN_IF_ERROR(AnnounceHttp(*server, options, "live page", kHttpSuffix));
  return server;
}

absl::StatusOr<int> Serve(const Settings& settings) {
  ComparatorService service(
      std::make_shared<Upstreams>(absl::GetFlag(FLAGS_rollout), absl::GetFlag(FLAGS_scorer),
                                  settings.upstream),
      settings.memory, settings.server.security.gate, settings.server.metrics);
  if (settings.server.metrics_port || settings.http_port) service.WatchSides();
  if (!settings.recording.path.empty()) {
    ISOBIT_RETURN_IF_ERROR(service.StartRecording(settings.recording));
  }
  if (settings.shadow_fraction > 0) service.StartShadow(settings.shadow_fraction);
  ServerRunner runner(settings.server);
  runner.Register(&service, v1::ComparatorService::service_full_name());
  ISOBIT_ASSIGN_OR_RETURN(const std::unique_ptr<HttpServer> metrics_page,
                          ServeMetrics(settings.server, runner));
  ISOBIT_ASSIGN_OR_RETURN(const std::unique_ptr<HttpServer> page,
                          ServePage(settings, service, runner));
  ISOBIT_RETURN_IF_ERROR(runner.Start());
  runner.SetServing(true);
  return runner.Wait([&] {
    service.BeginDrain();
    if (page != nullptr) page->BeginStop();
  });
}

}  // namespace
}  // namespace isobit

int main(int argc, char** argv) {
  return isobit::ServiceMain(argc, argv, isobit::kUsage, &isobit::SettingsFromFlags,
                             &isobit::Serve);
}
