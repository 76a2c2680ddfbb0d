// gRPC's C++ classes either take certificates once, or watch files and stop serving when
// certificate and key do not match. Its C interface asks at each connection, and can be told to
// keep what it has. So the credentials here are made with the C interface, which is stable in
// Debian's gRPC 1.51.
#include "common/rpc/server_credentials.h"

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "common/base/check.h"
#include "common/base/status_macros.h"
#include "common/rpc/tls_source.h"
#include "proto/isobit/status_convert.h"

namespace isobit {
namespace {

// Hands the certificates in force to gRPC.
class ConfigSource {
 public:
  explicit ConfigSource(std::unique_ptr<TlsSource> source) : source_(std::move(source)) {}

  // gRPC's callback at the start and at each connection. It keeps what it has unless the answer is
  // NEW.
  grpc_ssl_certificate_config_reload_status Fetch(grpc_ssl_server_certificate_config** config) {
    std::shared_ptr<const TlsPems> pems = source_->Current();
    const std::lock_guard lock(mutex_);
    if (pems == fetched_) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    const grpc_ssl_pem_key_cert_pair pair = {pems->key.c_str(), pems->certificate.c_str()};
    // gRPC requires roots even if it asks clients for no certificate and never uses the roots.
    const std::string& roots = pems->ca.empty() ? pems->certificate : pems->ca;
    *config = grpc_ssl_server_certificate_config_create(roots.c_str(), &pair, 1);
    fetched_ = std::move(pems);
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
  }

 private:
  const std::unique_ptr<TlsSource> source_;
  std::mutex mutex_;
  std::shared_ptr<const TlsPems> fetched_;  // guarded by mutex_; null: none yet
};

// What gRPC's credentials use; lives as long as they do.
struct Callbacks {
  CallCheck check;
  std::unique_ptr<ConfigSource> source;  // null: plain text
};

absl::string_view ViewOf(const grpc_slice& slice) {
  return {reinterpret_cast<const char*>(GRPC_SLICE_START_PTR(slice)), GRPC_SLICE_LENGTH(slice)};
}

std::vector<std::string> CertificateNames(const grpc_auth_context* context) {
  std::vector<std::string> names;
  if (grpc_auth_context_peer_is_authenticated(context) == 0) return names;
  grpc_auth_property_iterator it = grpc_auth_context_peer_identity(context);
  while (const grpc_auth_property* property = grpc_auth_property_iterator_next(&it)) {
    names.emplace_back(property->value, property->value_length);
  }
  return names;
}

void Process(void* state, grpc_auth_context* context, const grpc_metadata* metadata, size_t size,
             grpc_process_auth_metadata_done_cb done, void* user_data) {
  const auto& callbacks = *static_cast<const Callbacks*>(state);
  CallFacts facts;
  // In plain text gRPC names every caller "local", and reports that name as authenticated.
  if (callbacks.source != nullptr) facts.certificate_names = CertificateNames(context);
  for (size_t i = 0; i < size; ++i) {
    const absl::string_view key = ViewOf(metadata[i].key);
    if (key == ":path") facts.method = ViewOf(metadata[i].value);
    if (key == "authorization") {
      // Two such headers count as an invalid one: handlers could read the other one.
      facts.authorization = facts.authorization ? "" : ViewOf(metadata[i].value);
    }
  }
  const grpc::Status status = ToGrpcStatus(callbacks.check(facts));
  done(user_data, nullptr, 0, nullptr, 0, static_cast<grpc_status_code>(status.error_code()),
       status.ok() ? nullptr : status.error_message().c_str());
}

// The C interface's credentials, behind gRPC's C++ interface.
class Credentials final : public grpc::ServerCredentials {
 public:
  // Takes ownership of both. gRPC frees `callbacks` when nothing uses the credentials any more.
  Credentials(grpc_server_credentials* credentials, std::unique_ptr<Callbacks> callbacks)
      : credentials_(credentials) {
    grpc_server_credentials_set_auth_metadata_processor(
        credentials_, {&Process, [](void* state) { delete static_cast<Callbacks*>(state); },
                       callbacks.release()});
  }
  ~Credentials() override { grpc_server_credentials_release(credentials_); }

  void SetAuthMetadataProcessor(const std::shared_ptr<grpc::AuthMetadataProcessor>&) override {
    ISOBIT_CHECK(false) << "these credentials have a check of their own";
  }

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), credentials_);
  }

  grpc_server_credentials* const credentials_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> TlsCredentials(const TlsFiles& files,
                                                                        CallCheck check) {
  ISOBIT_ASSIGN_OR_RETURN(std::unique_ptr<TlsSource> pems, TlsSource::Open(files));
  auto source = std::make_unique<ConfigSource>(std::move(pems));
  grpc_init();  // until the credentials hold a reference to gRPC of their own
  grpc_ssl_server_credentials_options* const options =
      grpc_ssl_server_credentials_create_options_using_config_fetcher(
          files.ca.empty() ? GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE
                           : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY,
          [](void* user_data, grpc_ssl_server_certificate_config** config) {
            return static_cast<ConfigSource*>(user_data)->Fetch(config);
          },
          source.get());
  auto credentials = std::make_shared<Credentials>(
      grpc_ssl_server_credentials_create_with_options(options),
      std::unique_ptr<Callbacks>(new Callbacks{std::move(check), std::move(source)}));
  grpc_shutdown();
  return credentials;
}

std::shared_ptr<grpc::ServerCredentials> LoopbackCredentials(CallCheck check) {
  grpc_init();
  auto credentials = std::make_shared<Credentials>(
      grpc_local_server_credentials_create(LOCAL_TCP),
      std::unique_ptr<Callbacks>(new Callbacks{std::move(check), nullptr}));
  grpc_shutdown();
  return credentials;
}

}  // namespace isobit
