// SHA-256 through OpenSSL's EVP interface, which picks the CPU's SHA instructions where it has
// them.
#include "common/base/digest.h"

#include <openssl/evp.h>

#include "absl/strings/escaping.h"
#include "common/base/check.h"

namespace isobit {

void Sha256::FreeContext::operator()(evp_md_ctx_st* context) const { EVP_MD_CTX_free(context); }

Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
  ISOBIT_CHECK(context_ != nullptr) << "EVP_MD_CTX_new returned null";
  ISOBIT_CHECK(EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
}

void Sha256::Update(const void* data, size_t size) {
  ISOBIT_CHECK(context_ != nullptr) << "Update after HexFinish";
  ISOBIT_CHECK(EVP_DigestUpdate(context_.get(), data, size) == 1);
}

std::string Sha256::HexFinish() {
  ISOBIT_CHECK(context_ != nullptr) << "HexFinish called twice";
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int length = 0;
  ISOBIT_CHECK(EVP_DigestFinal_ex(context_.get(), digest, &length) == 1);
  context_.reset();
  return absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(digest), length));
}

std::string Sha256Hex(const void* data, size_t size) {
  Sha256 hash;
  hash.Update(data, size);
  return hash.HexFinish();
}

}  // namespace isobit
