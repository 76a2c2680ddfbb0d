// SHA-256, for the digests of weights and the fingerprint.
#ifndef ISOBIT_COMMON_BASE_DIGEST_H_
#define ISOBIT_COMMON_BASE_DIGEST_H_

#include <cstddef>
#include <memory>
#include <string>

struct evp_md_ctx_st;  // OpenSSL's EVP_MD_CTX

namespace isobit {

// A streaming hash: the digest depends on the bytes alone, not on how Update calls split them.
class Sha256 {
 public:
  Sha256();

  void Update(const void* data, size_t size);

  // The digest of all bytes so far, as 64 lower-case hex digits. Ends the stream: call it once, and
  // do not call Update afterwards.
  std::string HexFinish();

 private:
  struct FreeContext {
    void operator()(evp_md_ctx_st* context) const;
  };
  std::unique_ptr<evp_md_ctx_st, FreeContext> context_;
};

std::string Sha256Hex(const void* data, size_t size);

}  // namespace isobit

#endif  // ISOBIT_COMMON_BASE_DIGEST_H_
