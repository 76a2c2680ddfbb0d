// Channel credentials, and the plugin that adds the bearer token.
#include "common/rpc/channel_security.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "common/rpc/file_stamp.h"

namespace isobit {
namespace {

constexpr char kTokenFlag[] = "--upstream_token_file";
constexpr unsigned int kRefreshSeconds = 1;

// Adds the bearer token of a file to each call.
class TokenPlugin final : public grpc::MetadataCredentialsPlugin {
 public:
  TokenPlugin(std::string path, std::string token)
      : path_(std::move(path)), stamp_(StampOf(path_)), token_(std::move(token)) {}

  bool IsBlocking() const override { return false; }
  const char* GetType() const override { return "isobit token"; }
  grpc::string DebugString() override { return "isobit token"; }

  grpc::Status GetMetadata(grpc::string_ref, grpc::string_ref, const grpc::AuthContext&,
                           std::multimap<grpc::string, grpc::string>* metadata) override {
    const std::lock_guard lock(mutex_);
    if (const FileStamp stamp = StampOf(path_); stamp != stamp_) {
      stamp_ = stamp;
      absl::StatusOr<std::string> token = ReadToken(kTokenFlag, path_);
      if (token.ok()) {
        token_ = *std::move(token);
      } else {
        ISOBIT_LOG(Error) << "the old bearer token stays in use, because its file has changed and "
                          << token.status().message();
      }
    }
    metadata->emplace("authorization", absl::StrCat("Bearer ", token_));
    return grpc::Status::OK;
  }

 private:
  const std::string path_;
  std::mutex mutex_;  // guards all below
  FileStamp stamp_;   // of what was read last, good or bad
  std::string token_;
};

std::shared_ptr<grpc::ChannelCredentials> TlsChannelCredentials(const TlsFiles& files) {
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(
      std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
          files.key, files.certificate, files.ca, kRefreshSeconds));
  options.watch_root_certs();
  if (!files.certificate.empty()) options.watch_identity_key_cert_pairs();
  return grpc::experimental::TlsCredentials(options);
}

}  // namespace

absl::StatusOr<std::string> ReadToken(const std::string& what, const std::string& path) {
  ISOBIT_ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(what, path));
  std::string token(absl::StripAsciiWhitespace(text));
  if (token.empty() || !std::all_of(token.begin(), token.end(), absl::ascii_isgraph)) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " ", path, ": expected one token of printable characters"));
  }
  return token;
}

absl::StatusOr<ChannelSecurity> MakeChannelSecurity(const ChannelSecurityOptions& options) {
  const TlsFiles& tls = options.tls;
  const bool is_tls = !tls.ca.empty();
  if (!is_tls && (!tls.certificate.empty() || !tls.key.empty() || !options.server_name.empty())) {
    return absl::InvalidArgumentError(
        absl::StrCat(tls.ca_flag, ": expected, as other flags of upstream TLS are given"));
  }
  ISOBIT_RETURN_IF_ERROR(ReadTlsPems(tls).status());
  ChannelSecurity security;
  security.server_name = options.server_name;
  if (is_tls) security.credentials = TlsChannelCredentials(tls);
  if (options.token_file.empty()) return security;

  ISOBIT_ASSIGN_OR_RETURN(std::string token, ReadToken(kTokenFlag, options.token_file));
  if (!is_tls) security.credentials = grpc::experimental::LocalCredentials(LOCAL_TCP);
  security.credentials = grpc::CompositeChannelCredentials(
      security.credentials, grpc::experimental::MetadataCredentialsFromPlugin(
                                std::make_unique<TokenPlugin>(options.token_file, std::move(token)),
                                is_tls ? GRPC_PRIVACY_AND_INTEGRITY : GRPC_SECURITY_NONE));
  return security;
}

}  // namespace isobit
