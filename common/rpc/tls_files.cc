// See tls_files.h.
#include "common/rpc/tls_files.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <memory>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/base/status_macros.h"
#include "common/rpc/file_stamp.h"

namespace isobit {
namespace {

template <auto Free>
struct Freer {
  template <class T>
  void operator()(T* object) const {
    Free(object);
  }
};
using Bio = std::unique_ptr<BIO, Freer<&BIO_free>>;
using Certificate = std::unique_ptr<X509, Freer<&X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Freer<&EVP_PKEY_free>>;

Bio Open(const std::string& pem) {
  return Bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
}

// A key with a passphrase must not ask for it at a terminal.
int NoPassphrase(char*, int, int, void*) { return -1; }

Certificate FirstCertificate(const std::string& pem) {
  Certificate certificate(PEM_read_bio_X509(Open(pem).get(), nullptr, &NoPassphrase, nullptr));
  ERR_clear_error();
  return certificate;
}

Key PrivateKey(const std::string& pem) {
  Key key(PEM_read_bio_PrivateKey(Open(pem).get(), nullptr, &NoPassphrase, nullptr));
  ERR_clear_error();
  return key;
}

std::string TimeText(const ASN1_TIME* time) {
  const Bio out(BIO_new(BIO_s_mem()));
  ASN1_TIME_print(out.get(), time);
  char* text = nullptr;
  const long size = BIO_get_mem_data(out.get(), &text);  // NOLINT(google-runtime-int): OpenSSL's
  return std::string(text, static_cast<size_t>(size));
}

absl::Status CheckDates(const X509& certificate, const std::string& where) {
  if (X509_cmp_current_time(X509_get0_notAfter(&certificate)) <= 0) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": the certificate expired on ",
                                                   TimeText(X509_get0_notAfter(&certificate))));
  }
  if (X509_cmp_current_time(X509_get0_notBefore(&certificate)) > 0) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": the certificate is not valid before ",
                                                   TimeText(X509_get0_notBefore(&certificate))));
  }
  return absl::OkStatus();
}

absl::Status CheckPair(const TlsPems& pems, const TlsFiles& files) {
  const std::string where = absl::StrCat(files.certificate_flag, " ", files.certificate);
  const std::string key_where = absl::StrCat(files.key_flag, " ", files.key);
  const Certificate certificate = FirstCertificate(pems.certificate);
  if (certificate == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": expected a certificate in PEM"));
  }
  const Key key = PrivateKey(pems.key);
  if (key == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(key_where, ": expected a private key in PEM, without a passphrase"));
  }
  const bool match = X509_check_private_key(certificate.get(), key.get()) == 1;
  ERR_clear_error();
  if (!match) {
    return absl::InvalidArgumentError(
        absl::StrCat(key_where, ": the key is not that of the certificate ", files.certificate));
  }
  return CheckDates(*certificate, where);
}

}  // namespace

absl::StatusOr<TlsPems> ReadTlsPems(const TlsFiles& files) {
  if (files.certificate.empty() != files.key.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(files.certificate_flag, " and ", files.key_flag,
                                                   ": expected both or neither"));
  }
  TlsPems pems;
  if (!files.certificate.empty()) {
    ISOBIT_ASSIGN_OR_RETURN(pems.certificate,
                            ReadSmallFile(files.certificate_flag, files.certificate));
    ISOBIT_ASSIGN_OR_RETURN(pems.key, ReadSmallFile(files.key_flag, files.key));
    ISOBIT_RETURN_IF_ERROR(CheckPair(pems, files));
  }
  if (!files.ca.empty()) {
    ISOBIT_ASSIGN_OR_RETURN(pems.ca, ReadSmallFile(files.ca_flag, files.ca));
    if (FirstCertificate(pems.ca) == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat(files.ca_flag, " ", files.ca, ": expected certificates in PEM"));
    }
  }
  return pems;
}

}  // namespace isobit
