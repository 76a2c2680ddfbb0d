// OpenSSL contexts, made again when the files have changed, and the names in a certificate.
#include "common/http/tls_context.h"

#include <arpa/inet.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <array>

#include "absl/status/status.h"
#include "common/base/check.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"

namespace isobit {
namespace {

using Bio = std::unique_ptr<BIO, decltype(&BIO_free)>;
using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;
using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;

Bio BioOf(const std::string& text) {
  return {BIO_new_mem_buf(text.data(), static_cast<int>(text.size())), &BIO_free};
}

Certificate NextCertificate(BIO* bio) {
  return {PEM_read_bio_X509(bio, nullptr, nullptr, nullptr), &X509_free};
}

bool UseChain(SSL_CTX* context, const std::string& pem) {
  const Bio bio = BioOf(pem);
  const Certificate own = NextCertificate(bio.get());
  if (own == nullptr || SSL_CTX_use_certificate(context, own.get()) != 1) return false;
  while (const Certificate issuer = NextCertificate(bio.get())) {
    if (SSL_CTX_add1_chain_cert(context, issuer.get()) != 1) return false;
  }
  return true;
}

bool UseKey(SSL_CTX* context, const std::string& pem) {
  const Bio bio = BioOf(pem);
  const Key key(PEM_read_bio_PrivateKey(bio.get(), nullptr, nullptr, nullptr), &EVP_PKEY_free);
  return key != nullptr && SSL_CTX_use_PrivateKey(context, key.get()) == 1;
}

// Certificates of the bundle that cannot be used are left out, as TlsPems' reader has said.
bool UseCa(SSL_CTX* context, const std::string& pem) {
  const Bio bio = BioOf(pem);
  bool has_any = false;
  while (const Certificate ca = NextCertificate(bio.get())) {
    has_any |= X509_STORE_add_cert(SSL_CTX_get_cert_store(context), ca.get()) == 1;
  }
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  return has_any;
}

// Null if OpenSSL refuses what ReadTlsPems has found good, such as a key of few bits.
std::shared_ptr<SSL_CTX> ContextOf(const TlsPems& pems) {
  std::shared_ptr<SSL_CTX> context(SSL_CTX_new(TLS_server_method()), &SSL_CTX_free);
  ISOBIT_CHECK(context != nullptr) << "SSL_CTX_new";
  SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION);
  // Each connection shows its certificate anew.
  SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
  SSL_CTX_set_options(context.get(), SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
  SSL_CTX_set_mode(context.get(),
                   SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  const bool ok = UseChain(context.get(), pems.certificate) && UseKey(context.get(), pems.key) &&
                  (pems.ca.empty() || UseCa(context.get(), pems.ca));
  ERR_clear_error();
  return ok ? context : nullptr;
}

std::string TextOf(const ASN1_STRING* text) {
  return {reinterpret_cast<const char*>(ASN1_STRING_get0_data(text)),
          static_cast<size_t>(ASN1_STRING_length(text))};
}

std::string AddressOf(const ASN1_OCTET_STRING* address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  const int family = ASN1_STRING_length(address) == 4 ? AF_INET : AF_INET6;
  if (family == AF_INET6 && ASN1_STRING_length(address) != 16) return "";
  return inet_ntop(family, ASN1_STRING_get0_data(address), text.data(), text.size());
}

}  // namespace

absl::StatusOr<std::unique_ptr<TlsContext>> TlsContext::Open(const TlsFiles& files) {
  ISOBIT_ASSIGN_OR_RETURN(std::unique_ptr<TlsSource> source, TlsSource::Open(files));
  std::unique_ptr<TlsContext> context(new TlsContext(std::move(source)));
  if (context->Current() == nullptr) {
    return absl::InvalidArgumentError("OpenSSL cannot serve with this certificate and key");
  }
  return context;
}

std::shared_ptr<SSL_CTX> TlsContext::Current() {
  std::shared_ptr<const TlsPems> pems = source_->Current();
  const std::lock_guard lock(mutex_);
  if (pems == pems_) return context_;
  if (std::shared_ptr<SSL_CTX> context = ContextOf(*pems)) {
    context_ = std::move(context);
  } else {
    ISOBIT_LOG(Error) << "OpenSSL cannot serve HTTPS with the new certificate and key";
  }
  pems_ = std::move(pems);
  return context_;
}

std::vector<std::string> CertificateNamesOf(const SSL* connection) {
  std::vector<std::string> names;
  if (connection == nullptr) return names;
  const Certificate certificate(SSL_get1_peer_certificate(connection), &X509_free);
  if (certificate == nullptr) return names;
  const std::unique_ptr<GENERAL_NAMES, decltype(&GENERAL_NAMES_free)> alternatives(
      static_cast<GENERAL_NAMES*>(
          X509_get_ext_d2i(certificate.get(), NID_subject_alt_name, nullptr, nullptr)),
      &GENERAL_NAMES_free);
  for (int i = 0; i < sk_GENERAL_NAME_num(alternatives.get()); ++i) {
    const GENERAL_NAME* const name = sk_GENERAL_NAME_value(alternatives.get(), i);
    if (name->type == GEN_DNS) names.push_back(TextOf(name->d.dNSName));
    if (name->type == GEN_URI) names.push_back(TextOf(name->d.uniformResourceIdentifier));
    if (name->type == GEN_EMAIL) names.push_back(TextOf(name->d.rfc822Name));
    if (name->type == GEN_IPADD) names.push_back(AddressOf(name->d.iPAddress));
  }
  if (!names.empty()) return names;
  X509_NAME* const subject = X509_get_subject_name(certificate.get());
  const int at = X509_NAME_get_index_by_NID(subject, NID_commonName, -1);
  if (at >= 0) {
    names.push_back(TextOf(X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, at))));
  }
  return names;
}

}  // namespace isobit
