// The last good certificates, and the stamps of their files.
#include "common/rpc/tls_source.h"

#include "common/base/log.h"
#include "common/base/status_macros.h"

namespace isobit {

absl::StatusOr<std::unique_ptr<TlsSource>> TlsSource::Open(TlsFiles files) {
  std::unique_ptr<TlsSource> source(new TlsSource(std::move(files)));
  ISOBIT_ASSIGN_OR_RETURN(TlsPems pems, source->Read());
  source->pems_ = std::make_shared<const TlsPems>(std::move(pems));
  return source;
}

std::shared_ptr<const TlsPems> TlsSource::Current() {
  const std::lock_guard lock(mutex_);
  if (Stamps() == stamps_) return pems_;
  absl::StatusOr<TlsPems> pems = Read();
  if (!pems.ok()) {
    ISOBIT_LOG(Error) << "the old certificates stay in force, because the files have changed and "
                      << pems.status().message();
  } else if (*pems != *pems_) {
    pems_ = std::make_shared<const TlsPems>(*std::move(pems));
    ISOBIT_LOG(Info) << "new certificates are in force: " << files_.certificate;
  }
  return pems_;
}

absl::StatusOr<TlsPems> TlsSource::Read() {
  stamps_ = Stamps();
  return ReadTlsPems(files_);
}

std::vector<FileStamp> TlsSource::Stamps() const {
  return {StampOf(files_.certificate), StampOf(files_.key), StampOf(files_.ca)};
}

}  // namespace isobit
