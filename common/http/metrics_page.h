// A service's HTTP port: /metrics, in Prometheus's text format, and health pages.
#ifndef ISOBIT_COMMON_HTTP_METRICS_PAGE_H_
#define ISOBIT_COMMON_HTTP_METRICS_PAGE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "common/http/http_server.h"
#include "common/metrics/metrics.h"
#include "common/rpc/server_runner.h"

namespace isobit {

// Adds /metrics to `server`; each request gets the current figures of `metrics`.
void AddMetricsPage(HttpServer& server, std::shared_ptr<const Metrics> metrics);

// Adds /healthz and /readyz, open to every caller. /healthz returns 200 as long as the process
// lives; /readyz returns 200 while `runner`, which outlives `server`, serves, else 503.
void AddHealthPages(HttpServer& server, ServerRunner& runner);

// Serves all of these on the port of --metrics_port. Returns null if there is no such port. Call it
// once, before the runner's Start, so that the metrics' port file exists when the runner's does.
// Errors: those of HttpServer::Listen; the port file cannot be written.
absl::StatusOr<std::unique_ptr<HttpServer>> ServeMetrics(const ServerOptions& options,
                                                         ServerRunner& runner);

// Logs where `server` serves `what`. If the service has a port file, writes the port to the file of
// that name with `suffix` appended.
absl::Status AnnounceHttp(const HttpServer& server, const ServerOptions& options, const char* what,
                          const char* suffix);

}  // namespace isobit

#endif  // ISOBIT_COMMON_HTTP_METRICS_PAGE_H_
