// The accept loop.
#include "common/rpc/connection_acceptor.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "common/rpc/listening_socket.h"

namespace isobit {
namespace {

constexpr rlim_t kMaxDescriptors = 65536;
// How long the loop rests when the system has no descriptor or memory for a connection.
constexpr int kRestMs = 50;
constexpr std::chrono::seconds kLogInterval(1);
// How many connections are accepted in a row from one listener.
constexpr int kBatch = 64;

Descriptor OpenSpare() { return Descriptor(open("/dev/null", O_RDONLY | O_CLOEXEC)); }

absl::StatusOr<int64_t> ConnectionCap(int64_t wanted) {
  const int64_t descriptors = RaiseDescriptorLimit();
  if (wanted == 0) return std::min(ConnectionAcceptor::kDefaultMaxConnections, descriptors / 2);
  const int64_t most = descriptors - ConnectionAcceptor::kReservedDescriptors;
  if (wanted >= 1 && wanted <= most) return wanted;
  return absl::InvalidArgumentError(absl::StrCat("max_connections: ", wanted, ", expected 0 to ",
                                                 most, " at a limit of ", descriptors,
                                                 " descriptors"));
}

}  // namespace

int64_t RaiseDescriptorLimit() {
  rlimit limit;
  ISOBIT_CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0) << "getrlimit: errno " << errno;
  const rlim_t wanted = std::min(limit.rlim_max, kMaxDescriptors);
  if (limit.rlim_cur < wanted) {
    limit.rlim_cur = wanted;
    ISOBIT_CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0) << "setrlimit: errno " << errno;
  }
  return static_cast<int64_t>(std::min<rlim_t>(limit.rlim_cur, int64_t{1} << 31));
}

absl::StatusOr<std::unique_ptr<ConnectionAcceptor>> ConnectionAcceptor::Listen(
    const Options& options) {
  ISOBIT_ASSIGN_OR_RETURN(const int64_t max_connections, ConnectionCap(options.max_connections));
  if (options.max_connections_per_address < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_connections_per_address: ", options.max_connections_per_address,
                     ", expected at least 0"));
  }
  ISOBIT_ASSIGN_OR_RETURN(ListeningSockets listening, ListenOn(options.host, options.port));
  std::unique_ptr<ConnectionAcceptor> acceptor(new ConnectionAcceptor(options, max_connections));
  acceptor->port_ = listening.port;
  acceptor->listeners_ = std::move(listening.sockets);
  return acceptor;
}

ConnectionAcceptor::ConnectionAcceptor(const Options& options, int64_t max_connections)
    : max_connections_(max_connections),
      metrics_(options.metrics),
      num_accepted_(metrics_->AddCounter("isobit_connections_accepted_total",
                                         "Connections that were accepted and kept.",
                                         {{"listener", options.listener}})),
      num_refused_(metrics_->AddCounter("isobit_connections_refused_total",
                                        "Connections that were closed at once.",
                                        {{"listener", options.listener}})),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      spare_(OpenSpare()),
      connections_(max_connections,
                   options.max_connections_per_address > 0 ? options.max_connections_per_address
                                                           : (max_connections + 3) / 4,
                   /*exempts_loopback=*/options.max_connections_per_address == 0) {
  ISOBIT_CHECK(wake_.is_open()) << "eventfd: errno " << errno;
}

ConnectionAcceptor::~ConnectionAcceptor() { Stop(); }

void ConnectionAcceptor::AttachTo(grpc::ServerBuilder& builder,
                                  std::shared_ptr<grpc::ServerCredentials> credentials) {
  ISOBIT_CHECK(server_ == nullptr);
  server_ = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
      std::move(credentials));
}

void ConnectionAcceptor::Start() {
  ISOBIT_CHECK(server_ != nullptr && !thread_.joinable());
  thread_ = std::thread([this] { AcceptUntilStopped(); });
}

void ConnectionAcceptor::Stop() {
  if (thread_.joinable()) {
    ISOBIT_CHECK(eventfd_write(wake_.get(), 1) == 0) << "eventfd: errno " << errno;
    thread_.join();
  }
  listeners_.clear();
}

void ConnectionAcceptor::AcceptUntilStopped() {
  std::vector<pollfd> events = {{wake_.get(), POLLIN, 0}};
  for (const Descriptor& listener : listeners_) events.push_back({listener.get(), POLLIN, 0});
  bool can_accept = true;
  while (true) {
    // While it rests it polls only for the end: waiting connections would wake it over and over.
    if (poll(events.data(), can_accept ? events.size() : 1, can_accept ? -1 : kRestMs) < 0) {
      ISOBIT_CHECK(errno == EINTR || errno == ENOMEM) << "poll: errno " << errno;
      continue;
    }
    if (events[0].revents != 0) return;
    can_accept = std::all_of(listeners_.begin(), listeners_.end(),
                             [this](const auto& listener) { return AcceptAll(listener.get()); });
  }
}

bool ConnectionAcceptor::AcceptAll(int listener) {
  for (int i = 0; i < kBatch; ++i) {
    sockaddr_storage caller{};
    socklen_t size = sizeof caller;
    Descriptor connection(accept4(listener, reinterpret_cast<sockaddr*>(&caller), &size,
                                  SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (connection.is_open()) {
      Adopt(std::move(connection), caller);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      break;
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      RefuseOne(errno, listener);
      return false;
    }
    // Any other error is that of one connection, which was closed before it was accepted.
  }
  return true;
}

void ConnectionAcceptor::Adopt(Descriptor connection, const sockaddr_storage& caller) {
  if (const absl::Status added = connections_.Add(connection.get(), CallerAddressOf(caller));
      !added.ok()) {
    LogRefused(added.message());
    return;
  }
  num_accepted_.Increment();
  grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters parameters;
  parameters.fd = connection.Release();
  server_->HandleNewConnection(&parameters);
}

void ConnectionAcceptor::RefuseOne(int error, int listener) {
  // Closes the connection that has waited longest, instead of leaving it without an answer.
  spare_.Close();
  Descriptor(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC)).Close();
  spare_ = OpenSpare();
  LogRefused(std::strerror(error));
}

void ConnectionAcceptor::LogRefused(absl::string_view reason) {
  num_refused_.Increment();
  const auto now = std::chrono::steady_clock::now();
  if (now < next_log_) return;
  ISOBIT_LOG(Warning) << "connections refused since the last such line: "
                      << static_cast<int64_t>(num_refused_.Value() - num_logged_) << ", as "
                      << reason;
  num_logged_ = num_refused_.Value();
  next_log_ = now + kLogInterval;
}

}  // namespace isobit
