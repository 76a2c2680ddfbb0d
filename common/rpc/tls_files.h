// Certificates and keys in PEM files. They are checked with OpenSSL before gRPC gets them, because
// gRPC's errors name neither file nor reason.
#ifndef ISOBIT_COMMON_RPC_TLS_FILES_H_
#define ISOBIT_COMMON_RPC_TLS_FILES_H_

#include <string>

#include "absl/status/statusor.h"

namespace isobit {

// Paths, empty if there is no file, and the flags' names for errors.
struct TlsFiles {
  std::string certificate{};  // a chain, this process's own certificate first
  std::string key{};          // of that certificate
  std::string ca{};           // the authorities to trust: a bundle
  // The flags' names, for errors.
  std::string certificate_flag = "--tls_cert";
  std::string key_flag = "--tls_key";
  std::string ca_flag = "--tls_client_ca";
};

// The contents of the files; empty if there is no path.
struct TlsPems {
  std::string certificate;
  std::string key;
  std::string ca;
  bool operator==(const TlsPems&) const = default;
};

// Errors name flag and file. INVALID_ARGUMENT: certificate without key or key without certificate;
// the file is no PEM, or a certificate in it cannot be read; the key does not match the first
// certificate; a certificate in the chain, or every one in the CA's bundle, is expired or not valid
// yet. NOT_FOUND and others: a file cannot be read.
absl::StatusOr<TlsPems> ReadTlsPems(const TlsFiles& files);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_TLS_FILES_H_
