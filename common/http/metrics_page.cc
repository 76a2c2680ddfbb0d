// Serializes metrics, and answers probes.
#include "common/http/metrics_page.h"

#include <prometheus/text_serializer.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "common/rpc/channel.h"
#include "common/rpc/port_file.h"

namespace isobit {

void AddMetricsPage(HttpServer& server, std::shared_ptr<const Metrics> metrics) {
  server.Get("/metrics",
             [metrics = std::move(metrics)](const httplib::Request&, httplib::Response& response) {
               response.set_content(prometheus::TextSerializer().Serialize(metrics->Collect()),
                                    "text/plain; version=0.0.4; charset=utf-8");
             });
}

void AddHealthPages(HttpServer& server, ServerRunner& runner) {
  server.GetOpen(
      "/healthz",
      [](const httplib::Request&, httplib::Response& response) {
        response.set_content("alive\n", "text/plain");
      },
      HttpServer::Kind::kHealth);
  server.GetOpen(
      "/readyz",
      [&runner](const httplib::Request&, httplib::Response& response) {
        const bool serves = runner.is_serving();
        response.status = serves ? 200 : 503;
        response.set_content(serves ? "serving\n" : "not serving\n", "text/plain");
      },
      HttpServer::Kind::kHealth);
}

absl::StatusOr<std::unique_ptr<HttpServer>> ServeMetrics(const ServerOptions& options,
                                                         ServerRunner& runner) {
  if (!options.metrics_port) return nullptr;
  ISOBIT_ASSIGN_OR_RETURN(std::unique_ptr<HttpServer> server,
                          HttpServer::Listen({.host = options.host,
                                              .port = *options.metrics_port,
                                              .tls = options.security.tls,
                                              .gate = options.security.gate,
                                              .host_names = options.http_hosts}));
  AddMetricsPage(*server, options.metrics);
  AddHealthPages(*server, runner);
  server->Start();
  ISOBIT_RETURN_IF_ERROR(AnnounceHttp(*server, options, "metrics", ".metrics"));
  return server;
}

absl::Status AnnounceHttp(const HttpServer& server, const ServerOptions& options, const char* what,
                          const char* suffix) {
  ISOBIT_LOG(Info) << what << " on " << (server.is_tls() ? "https://" : "http://")
                   << HostAndPort(options.host, server.port());
  if (options.port_file.empty()) return absl::OkStatus();
  return WritePortFile(absl::StrCat(options.port_file, suffix), server.port());
}

}  // namespace isobit
