// Certificates and keys as PEM files: read, and checked with OpenSSL before gRPC sees them, whose
// errors name neither file nor reason.
#ifndef ISOBIT_COMMON_RPC_TLS_FILES_H_
#define ISOBIT_COMMON_RPC_TLS_FILES_H_

#include <string>

#include "absl/status/statusor.h"

namespace isobit {

// Paths; empty: none. With the flags' names in errors.
struct TlsFiles {
  std::string certificate{};  // a chain, one's own certificate first
  std::string key{};          // of that certificate
  std::string ca{};           // whom to trust: a bundle
  // Of the flags, for errors.
  std::string certificate_flag = "--tls_cert";
  std::string key_flag = "--tls_key";
  std::string ca_flag = "--tls_client_ca";
};

// Their contents; empty where there is no path.
struct TlsPems {
  std::string certificate;
  std::string key;
  std::string ca;
  bool operator==(const TlsPems&) const = default;
};

// Errors name flag and file. INVALID_ARGUMENT: a certificate without key or the reverse; no PEM, or
// any certificate of a file that is none; a key that is not the first certificate's; any of the
// chain, or every one of the CA's bundle, that has expired or is not valid yet. NOT_FOUND and the
// like: a file cannot be read.
absl::StatusOr<TlsPems> ReadTlsPems(const TlsFiles& files);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_TLS_FILES_H_
