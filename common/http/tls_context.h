// TLS, under the same rules as the gRPC servers', for a server that uses OpenSSL directly.
#ifndef ISOBIT_COMMON_HTTP_TLS_CONTEXT_H_
#define ISOBIT_COMMON_HTTP_TLS_CONTEXT_H_

#include <openssl/ssl.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/rpc/tls_source.h"

namespace isobit {

// Thread-safe.
class TlsContext {
 public:
  // TLS 1.2 or 1.3 with `files`, which name a certificate. If they name a CA, clients need a
  // certificate signed by it. Errors: those of ReadTlsPems.
  static absl::StatusOr<std::unique_ptr<TlsContext>> Open(const TlsFiles& files);

  // For a new connection, with the certificates currently in force.
  std::shared_ptr<SSL_CTX> Current();

 private:
  explicit TlsContext(std::unique_ptr<TlsSource> source) : source_(std::move(source)) {}

  const std::unique_ptr<TlsSource> source_;
  std::mutex mutex_;
  std::shared_ptr<const TlsPems> pems_;  // of context_; guarded by mutex_
  std::shared_ptr<SSL_CTX> context_;     // guarded by mutex_
};

// The names in the client's certificate: its subject alternative names, or its common name if it
// has none. Empty without a certificate. The same names as gRPC reports.
std::vector<std::string> CertificateNamesOf(const SSL* connection);

}  // namespace isobit

#endif  // ISOBIT_COMMON_HTTP_TLS_CONTEXT_H_
