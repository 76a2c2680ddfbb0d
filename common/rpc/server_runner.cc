// Runs a gRPC server from listening to exit.
#include "common/rpc/server_runner.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/access/audit_log.h"
#include "common/access/health_watches.h"
#include "common/base/allocator.h"
#include "common/base/check.h"
#include "common/base/descriptor.h"
#include "common/base/exhaustion.h"
#include "common/base/exit_code.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "common/rpc/channel.h"
#include "common/rpc/limits.h"
#include "common/rpc/port_file.h"
#include "common/rpc/request_watch.h"

namespace isobit {
namespace {

// Connections of the admin port, which has few callers; one address may have a quarter of them.
constexpr int64_t kMaxAdminConnections = 64;

sigset_t StopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  return signals;
}

// After the name of the port file.
constexpr char kAdminSuffix[] = ".admin";

// How long clients have to close their connections before they are closed. In some languages an
// idle client looks at its connection only every five seconds.
constexpr std::chrono::milliseconds kGoodbyeTimeout(500);
// About as many threads as gRPC starts at first.
constexpr int kGrpcThreads = 32;
// How often memory may be returned to the system, and how much must have been freed. Otherwise the
// allocator keeps it: 400 MB after 20,000 calls that were reset.
constexpr int kReturnIntervalMs = 2000;
constexpr size_t kReturnBytes = 16 << 20;

}  // namespace

absl::Status CheckPortFiles(const ServerOptions& options) {
  if (options.port_file.empty()) return absl::OkStatus();
  ISOBIT_RETURN_IF_ERROR(CheckPortFile(options.port_file));
  for (const auto& [port, suffix] :
       {std::pair(options.admin_port, kAdminSuffix), std::pair(options.metrics_port, ".metrics")}) {
    if (!port) continue;
    ISOBIT_RETURN_IF_ERROR(CheckPortFile(absl::StrCat(options.port_file, suffix)));
  }
  return absl::OkStatus();
}

void ServerRunner::BlockStopSignals() {
  const sigset_t signals = StopSignals();
  ISOBIT_CHECK(pthread_sigmask(SIG_BLOCK, &signals, nullptr) == 0) << "pthread_sigmask";
}

void SetServerArguments(grpc::ServerBuilder& builder, int max_request_bytes,
                        int max_response_bytes) {
  builder.SetMaxReceiveMessageSize(max_request_bytes);
  builder.SetMaxSendMessageSize(max_response_bytes);
  // gRPC decompresses a whole message before it checks its size.
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxConcurrentStreams);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveTimeMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             kMinPingIntervalMs);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeTimeoutMs);
}

ServerRunner::ServerRunner(ServerOptions options)
    : options_(std::move(options)),
      calls_in_flight_(options_.metrics->Observe(
          prometheus::MetricType::Gauge, "isobit_calls_in_flight", "Calls in flight, but health.",
          [calls = calls_] { return static_cast<double>(calls->calls()); })),
      log_lines_dropped_(options_.metrics->Observe(
          prometheus::MetricType::Counter, "isobit_log_lines_dropped_total",
          "Lines of the log that nobody took.",
          [] { return static_cast<double>(LogLinesDropped()); })),
      audit_lines_lost_(options_.metrics->Observe(
          prometheus::MetricType::Counter, "isobit_audit_lines_lost_total",
          "Audit lines that --audit_log did not take.",
          [] { return static_cast<double>(AuditLinesLost()); })),
      health_watches_(HealthWatchQuota()),
      wake_fd_(eventfd(0, EFD_CLOEXEC)) {
  ISOBIT_CHECK(wake_fd_ >= 0) << "eventfd: errno " << errno;
}

ServerRunner::~ServerRunner() {
  StopAccepting();
  for (const Port& port : ports_) port.server->Shutdown(std::chrono::steady_clock::now());
  close(wake_fd_);
}

void ServerRunner::Register(grpc::Service* service, const std::string& full_name) {
  ISOBIT_CHECK(ports_.empty()) << "Register(" << full_name << ") after Start";
  services_.push_back(service);
  service_names_.push_back(full_name);
}

absl::Status ServerRunner::Start() {
  ISOBIT_CHECK(ports_.empty()) << "Start called twice";
  if (options_.drain_timeout.count() < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "drain timeout: ", options_.drain_timeout.count(), " ms, expected at least 0"));
  }
  ISOBIT_RETURN_IF_ERROR(CheckPortFiles(options_));
  ISOBIT_RETURN_IF_ERROR(CheckThreadsCanStart(kGrpcThreads));
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();

  ISOBIT_RETURN_IF_ERROR(
      Listen(Listener::kMain, {.host = options_.host,
                               .port = options_.port,
                               .max_connections = options_.max_connections,
                               .max_connections_per_address = options_.max_connections_per_address,
                               .metrics = options_.metrics}));
  if (options_.admin_port) {
    ISOBIT_RETURN_IF_ERROR(Listen(Listener::kAdmin, {.host = options_.host,
                                                     .port = *options_.admin_port,
                                                     .max_connections = kMaxAdminConnections,
                                                     .metrics = options_.metrics,
                                                     .listener = "admin"}));
  }
  SetServing(false);
  return StartAccepting();
}

absl::Status ServerRunner::Listen(Listener listener, const ConnectionAcceptor::Options& options) {
  Port port;
  ISOBIT_ASSIGN_OR_RETURN(port.acceptor, ConnectionAcceptor::Listen(options));
  const ServerSecurity& security = options_.security;
  const auto& credentials =
      listener == Listener::kMain ? security.credentials : security.admin_credentials;
  grpc::ServerBuilder builder;
  port.acceptor->AttachTo(builder,
                          credentials != nullptr ? credentials : grpc::InsecureServerCredentials());
  for (grpc::Service* service : services_) builder.RegisterService(service);
  SetServerArguments(builder, kMaxRequestBytes, kMaxMessageBytes);
  if (options_.max_connection_age.count() > 0) {
    const std::chrono::milliseconds age = options_.max_connection_age;
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS, static_cast<int>(age.count()));
  }
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> interceptors;
  interceptors.push_back(CountCallsOf(service_names_, calls_));
  interceptors.push_back(WatchRequests(freed_bytes_));
  interceptors.push_back(LimitHealthWatches(health_watches_));
  if (security.gate != nullptr) interceptors.push_back(security.gate->InterceptorFor(listener));
  builder.experimental().SetInterceptorCreators(std::move(interceptors));
  port.server = builder.BuildAndStart();
  if (port.server == nullptr) return absl::UnavailableError("cannot start the gRPC server");
  ports_.push_back(std::move(port));
  return absl::OkStatus();
}

absl::Status ServerRunner::StartAccepting() {
  for (const Port& port : ports_) {
    port.acceptor->Start();
    ISOBIT_LOG(Info) << (&port == &ports_.front() ? "listening on " : "admin calls on ")
                     << HostAndPort(options_.host, port.acceptor->port()) << ", at most "
                     << port.acceptor->max_connections() << " connections";
  }
  if (options_.port_file.empty()) return absl::OkStatus();
  if (options_.admin_port) {
    ISOBIT_RETURN_IF_ERROR(WritePortFile(absl::StrCat(options_.port_file, kAdminSuffix),
                                         ports_.back().acceptor->port()));
  }
  return WritePortFile(options_.port_file, port());
}

void ServerRunner::StopAccepting() {
  for (const Port& port : ports_) port.acceptor->Stop();
}

void ServerRunner::SetServing(bool serving) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!draining_) SetServingLocked(serving);
}

void ServerRunner::SetServingLocked(bool serving) {
  serving_ = serving;
  for (const Port& port : ports_) {
    grpc::HealthCheckServiceInterface* health = port.server->GetHealthCheckService();
    // Each service must be set by name, too: the form without a name covers only names that were
    // set before.
    for (const std::string& name : service_names_) health->SetServingStatus(name, serving);
    health->SetServingStatus(serving);
  }
}

bool ServerRunner::is_serving() {
  const std::lock_guard lock(mutex_);
  return serving_;
}

bool ServerRunner::is_draining() {
  const std::lock_guard lock(mutex_);
  return draining_;
}

void ServerRunner::Stop() { Wake(); }

void ServerRunner::Fail(const absl::Status& fault) {
  ISOBIT_LOG(Error) << "fatal: " << fault.ToString();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (fault_.ok()) fault_ = fault;
    if (!draining_) SetServingLocked(false);
  }
  Wake();
}

void ServerRunner::Wake() {
  const uint64_t one = 1;
  ISOBIT_CHECK(write(wake_fd_, &one, sizeof one) == sizeof one) << "eventfd: errno " << errno;
}

void ServerRunner::WaitForStop() {
  const sigset_t signals = StopSignals();
  const Descriptor signal_fd(signalfd(-1, &signals, SFD_CLOEXEC));
  ISOBIT_CHECK(signal_fd.is_open()) << "signalfd: errno " << errno;
  pollfd events[] = {{signal_fd.get(), POLLIN, 0}, {wake_fd_, POLLIN, 0}};
  size_t most_bytes = 0;  // allocated at any look since memory was last returned
  while (true) {
    const int num_ready = poll(events, 2, kReturnIntervalMs);
    if (num_ready > 0) return;
    ISOBIT_CHECK(num_ready == 0 || errno == EINTR) << "poll: errno " << errno;
    // Two signs of freed memory. freed_bytes_ misses calls that are reset before a handler gets
    // them, and counts a call just before it frees. The allocator's figure misses what is taken and
    // freed between two looks.
    const size_t bytes = SmallBlockBytes();
    most_bytes = std::max(most_bytes, bytes);
    if (*freed_bytes_ < kReturnBytes && most_bytes - bytes < kReturnBytes) continue;
    *freed_bytes_ = 0;
    most_bytes = bytes;
    ReturnFreeMemory();
  }
}

int ServerRunner::Wait(const std::function<void()>& drain) {
  ISOBIT_CHECK(!ports_.empty()) << "Wait before Start";
  WaitForStop();

  ISOBIT_LOG(Info) << "draining, at most " << options_.drain_timeout.count() << " ms";
  {
    std::lock_guard<std::mutex> lock(mutex_);
    SetServingLocked(false);
    draining_ = true;
  }
  if (drain) drain();
  const auto deadline = std::chrono::steady_clock::now() + options_.drain_timeout;
  // While the calls in flight finish, the services themselves refuse new ones with UNAVAILABLE;
  // gRPC's Shutdown would cancel them.
  calls_->WaitForNone(deadline);
  // INVARIANT: what is late ends with UNAVAILABLE, which clients retry; never with CANCELLED
  // (ServerProcessTest.*, tests/e2e/lifecycle_test.py).
  if (const size_t late = calls_->EndAll(absl::UnavailableError("the server has stopped"))) {
    ISOBIT_LOG(Warning) << late << " calls that have not finished are ended";
  }
  calls_->WaitForNone(std::chrono::steady_clock::now() + kGoodbyeTimeout);
  StopAccepting();
  // From here on a client sees that its connection has ended, so that its calls are UNAVAILABLE.
  // Calls that reach gRPC's Shutdown are cancelled.
  for (const Port& port : ports_) port.acceptor->EndConnections();
  const auto goodbye = std::chrono::steady_clock::now() + kGoodbyeTimeout;
  for (const Port& port : ports_) {
    port.server->Shutdown(goodbye);
    port.server->Wait();
  }

  std::lock_guard<std::mutex> lock(mutex_);
  ISOBIT_LOG(Info) << "stopped";
  return fault_.ok() ? kExitStopped : kExitFailed;
}

}  // namespace isobit
