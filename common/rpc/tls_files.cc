// Reads PEM files and checks dates, keys and chains with OpenSSL.
#include "common/rpc/tls_files.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/base/log.h"
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

// All certificates in `pem`, at least one, with any text between them. INVALID_ARGUMENT, naming the
// first that cannot be read: gRPC would silently stop there, or refuse every connection.
absl::StatusOr<std::vector<Certificate>> Certificates(const std::string& pem,
                                                      const std::string& where) {
  std::vector<Certificate> certificates;
  const Bio bio = Open(pem);
  while (Certificate next{PEM_read_bio_X509(bio.get(), nullptr, &NoPassphrase, nullptr)}) {
    certificates.push_back(std::move(next));
  }
  const bool is_end = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  ERR_clear_error();
  if (is_end && !certificates.empty()) return certificates;
  return absl::InvalidArgumentError(absl::StrCat(where, ": expected certificates in PEM, cannot ",
                                                 "read number ", certificates.size() + 1));
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
  ISOBIT_ASSIGN_OR_RETURN(const std::vector<Certificate> chain,
                          Certificates(pems.certificate, where));
  const Key key = PrivateKey(pems.key);
  if (key == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(key_where, ": expected a private key in PEM, without a passphrase"));
  }
  const bool match = X509_check_private_key(chain.front().get(), key.get()) == 1;
  ERR_clear_error();
  if (!match) {
    return absl::InvalidArgumentError(
        absl::StrCat(key_where, ": the key is not that of the certificate ", files.certificate));
  }
  for (size_t i = 0; i < chain.size(); ++i) {
    ISOBIT_RETURN_IF_ERROR(
        CheckDates(*chain[i], absl::StrCat(where, ", number ", i + 1, " of ", chain.size())));
  }
  return absl::OkStatus();
}

// A bundle may keep authorities that have expired beside those in force, as systems' bundles do.
absl::Status CheckBundle(const std::string& pem, const std::string& where) {
  ISOBIT_ASSIGN_OR_RETURN(const std::vector<Certificate> bundle, Certificates(pem, where));
  absl::Status first;
  size_t num_unusable = 0;
  for (size_t i = 0; i < bundle.size(); ++i) {
    const absl::Status dates =
        CheckDates(*bundle[i], absl::StrCat(where, ", number ", i + 1, " of ", bundle.size()));
    if (dates.ok()) continue;
    ++num_unusable;
    first.Update(dates);
  }
  if (num_unusable == bundle.size()) return first;
  if (num_unusable > 0) {
    ISOBIT_LOG(Warning) << "certificates in a CA's bundle that cannot be used: " << num_unusable
                        << "; the first: " << first.message();
  }
  return absl::OkStatus();
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
    ISOBIT_RETURN_IF_ERROR(CheckBundle(pems.ca, absl::StrCat(files.ca_flag, " ", files.ca)));
  }
  return pems;
}

}  // namespace isobit
