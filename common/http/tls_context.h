// TLS for a server that talks to OpenSSL itself, with the rules of the gRPC servers.
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
  // TLS 1.2 or 1.3 with `files`, which name a certificate; if they name a CA, clients need a
  // certificate of it. Errors: as ReadTlsPems.
  static absl::StatusOr<std::unique_ptr<TlsContext>> Open(const TlsFiles& files);

  // For a new connection: with the certificates in force now.
  std::shared_ptr<SSL_CTX> Current();

 private:
  explicit TlsContext(std::unique_ptr<TlsSource> source) : source_(std::move(source)) {}

  const std::unique_ptr<TlsSource> source_;
  std::mutex mutex_;
  std::shared_ptr<const TlsPems> pems_;  // of context_; guarded by mutex_
  std::shared_ptr<SSL_CTX> context_;     // guarded by mutex_
};

// The names in the certificate that the client has shown: its subject alternative names, or the
// common name if it has none; empty without a certificate. As gRPC reports them.
std::vector<std::string> CertificateNamesOf(const SSL* connection);

}  // namespace isobit

#endif  // ISOBIT_COMMON_HTTP_TLS_CONTEXT_H_
