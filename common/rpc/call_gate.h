// The gate of a server: it identifies the caller, checks what the caller may do, and limits what
// the caller holds. It acts at four places:
//  - the credentials check each call by method, role and listener before its message is read;
//  - an interceptor knows the caller for as long as the call lasts, writes the audit line, and
//    removes the server's paths from error messages to callers who may not see them;
//  - a thread looks at the access file every second, and ends the calls in flight that would not be
//    let in any more;
//  - handlers ask it for what depends on the message: quotas, and who may end whose requests; and,
//    right before anything takes effect, whether the caller still may.
#ifndef ISOBIT_COMMON_RPC_CALL_GATE_H_
#define ISOBIT_COMMON_RPC_CALL_GATE_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_interceptor.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/base/repeating_thread.h"
#include "common/rpc/access_list.h"
#include "common/rpc/audit_log.h"
#include "common/rpc/end_call.h"
#include "common/rpc/quota.h"
#include "common/rpc/server_credentials.h"

namespace isobit {

// Where a call came in.
enum class Listener {
  kMain,   // all methods, except admin methods if there is an admin port
  kAdmin,  // admin methods, and health
};

struct CallGateOptions {
  std::shared_ptr<AccessFile> access = nullptr;  // null: everybody may call everything
  std::shared_ptr<Quota> quota = nullptr;        // null: without bounds
  std::unique_ptr<AuditLog> audit = nullptr;     // null: no audit lines
  bool has_admin_port = false;
};

// Thread-safe.
class CallGate : public std::enable_shared_from_this<CallGate> {
 public:
  // The default lets everybody do everything.
  static std::shared_ptr<CallGate> Create(CallGateOptions options = {});

  // Whether calls need a check, and so credentials that can perform it.
  bool checks_calls() const { return options_.access != nullptr || options_.has_admin_port; }

  // The check for the credentials of a listener. UNAUTHENTICATED: the call has neither bearer token
  // nor certificate, or one that the access file does not know. PERMISSION_DENIED, naming the role:
  // the client lacks it.
  CallCheck CheckFor(Listener listener);
  // The header that the credentials of `listener` must hide; empty: none. A call's context does not
  // say which listener it came from, so the gate tells by this header.
  std::string HiddenHeaderOf(Listener listener) const;

  // The interceptor factory for the server that has these credentials.
  std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> Interceptor();

  // All below are for handlers, with the context of a call under way. Without the
  // interceptor, as in tests of one service, everybody is one client who may do everything.

  // Whether the call would be let in now, by the access file as it is. Ask right before anything
  // takes effect; it costs one look at the file. Errors: those of CheckFor. Once there is one, the
  // call ends with it, unless it ends with OK. Does not block on gRPC, so that any lock may be
  // held. INVARIANT: nothing takes effect for a client that the file no longer names
  // (CallGateTest.*, AccessTest.*).
  absl::Status Recheck(const grpc::ServerContextBase& context);

  // Recheck; then takes `amounts` of the client's quota until the call ends, in addition to what
  // the call took before. Errors: as Recheck and Quota::Take.
  absl::Status Admit(const grpc::ServerContextBase& context, const QuotaAmounts& amounts);

  // The client's name: that in the access file, or, without an access file, that of held_bytes.h's
  // ClientOf.
  std::string ClientOf(const grpc::ServerContextBase& context) const;

  // Writes the audit line of a call under way, whose end then leaves one only if it is refused
  // later: AuditLog::Write if `outcome` is OK, else WriteRefused.
  void Audit(const grpc::ServerContextBase& context, std::string method, std::string arguments,
             const absl::Status& outcome);

  // OK if the client may do, at this listener, what needs the role admin; else PERMISSION_DENIED.
  absl::Status CheckAdmin(const grpc::ServerContextBase& context) const;

 private:
  friend class GatedCall;

  // What a call shows of its caller.
  struct Credentials {
    std::optional<std::string> authorization;
    std::vector<std::string> certificate_names;
  };

  // A call under way.
  struct Call {
    std::string method;
    Credentials credentials;
    bool is_at_main_port = false;  // and there is an admin port
    OpenCall handle;
    std::string client;
    absl::Status admin;  // CheckAdmin's answer
    bool sees_paths = true;
    std::vector<Quota::Lease> leases{};
    std::shared_ptr<const AccessList> list{};  // by which it was judged last
    absl::Status refusal{};                    // why it may not go on
    bool has_been_ended = false;               // because of that
    bool has_audit_line = false;               // by Audit
  };

  explicit CallGate(CallGateOptions options);
  absl::Status Check(Listener listener, const CallFacts& facts);
  void Enter(grpc::ServerContextBase& context, const std::string& method);
  void ReturnQuota(const grpc::ServerContextBase& context);
  void Leave(const grpc::ServerContextBase& context);
  bool SeesPaths(const grpc::ServerContextBase& context) const;
  // What Recheck has said of the call: OK, or the first error.
  absl::Status RefusalOf(const grpc::ServerContextBase& context) const;
  bool HasAuditLine(const grpc::ServerContextBase& context) const;
  // Sets what follows from the access list; null: there is none. Returns the call's refusal.
  static absl::Status Judge(std::shared_ptr<const AccessList> list, Call& call);

  // Ends the calls in flight that the access file as it is would not let in.
  void EndRefusedCalls();

  const CallGateOptions options_;
  mutable std::mutex mutex_;  // guards what follows
  std::unordered_map<const grpc::ServerContextBase*, Call> calls_;

  // With an access file. It may let go of the last reference to the gate, with the last call that
  // it has ended.
  std::optional<RepeatingThread> watcher_;
};

// `message` with every absolute path in it replaced.
std::string WithoutPaths(absl::string_view message);

}  // namespace isobit

#endif  // ISOBIT_COMMON_RPC_CALL_GATE_H_
