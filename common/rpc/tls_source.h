// A server's certificates, which are read again when their files change.
#ifndef ISOBIT_COMMON_RPC_TLS_SOURCE_H_
#define ISOBIT_COMMON_RPC_TLS_SOURCE_H_

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/file_stamp.h"
#include "common/rpc/tls_files.h"

namespace isobit {

// Thread-safe.
class TlsSource {
 public:
  // Reads `files`, which name a certificate. Errors: those of ReadTlsPems.
  static absl::StatusOr<std::unique_ptr<TlsSource>> Open(TlsFiles files);

  // The certificates in force; after each change another object. If changed files are invalid, the
  // error is logged and the old ones stay in force.
  // INVARIANT: a certificate and key that do not match are never in force (attack_tls_test).
  std::shared_ptr<const TlsPems> Current();

 private:
  explicit TlsSource(TlsFiles files) : files_(std::move(files)) {}
  absl::StatusOr<TlsPems> Read();
  std::vector<FileStamp> Stamps() const;

  const TlsFiles files_;
  std::mutex mutex_;
  std::vector<FileStamp> stamps_;        // of the content read last, good or bad; guarded by mutex_
  std::shared_ptr<const TlsPems> pems_;  // guarded by mutex_
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_TLS_SOURCE_H_
