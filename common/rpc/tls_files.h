// Certificates and keys in PEM files. They are checked with OpenSSL before gRPC gets them, because
// gRPC's errors name neither file nor reason.
#ifndef ISOBIT_COMMON_RPC_TLS_FILES_H_
#define ISOBIT_COMMON_RPC_TLS_FILES_H_

#include <string>

#include "absl/status/statusor.h"

namespace isobit {

// Paths; empty: none. With the flags' names in errors.
struct TlsFiles {
  std::string certificate{};  // a chain, this process's own certificate first
  std::string key{};          // of that certificate
  std::string ca{};           // the authorities to trust: a bundle
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

// Errors name flag and file. INVALID_ARGUMENT: a certificate without a key, or a key without a
// certificate; a file that is no PEM, or has a certificate that cannot be read; a key that is not
// that of the first certificate; a certificate in the chain, or all in the CA's bundle, expired or
// not valid yet. NOT_FOUND and the like: a file cannot be read.
absl::StatusOr<TlsPems> ReadTlsPems(const TlsFiles& files);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_TLS_FILES_H_
