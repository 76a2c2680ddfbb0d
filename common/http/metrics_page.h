// A service's HTTP port: /metrics, in Prometheus's text format, and its health.
#ifndef ISOBIT_COMMON_HTTP_METRICS_PAGE_H_
#define ISOBIT_COMMON_HTTP_METRICS_PAGE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "common/http/http_server.h"
#include "common/metrics/metrics.h"
#include "common/rpc/server_runner.h"

namespace isobit {

// Adds /metrics to `server`, with the figures of `metrics` at the time of each request.
void AddMetricsPage(HttpServer& server, std::shared_ptr<const Metrics> metrics);

// Adds /healthz and /readyz, for all who can connect: 200 as long as the process lives, and 200
// while `runner`, which outlives `server`, serves; else 503.
void AddHealthPages(HttpServer& server, ServerRunner& runner);

// Serves all of these as --metrics_port says, once; null: there is no such port. To be called
// before the runner's Start, so that the port file of the metrics is there when the runner's is.
// Errors: as HttpServer::Listen, and a port file that cannot be written.
absl::StatusOr<std::unique_ptr<HttpServer>> ServeMetrics(const ServerOptions& options,
                                                         ServerRunner& runner);

// Logs where `server` serves `what`, and writes its port to the service's port file with
// `suffix` after its name, if there is one.
absl::Status AnnounceHttp(const HttpServer& server, const ServerOptions& options, const char* what,
                          const char* suffix);

}  // namespace isobit

#endif  // ISOBIT_COMMON_HTTP_METRICS_PAGE_H_
