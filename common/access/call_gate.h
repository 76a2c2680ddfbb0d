// The gate of a process: it identifies the caller, checks what the caller may do, and limits what
// the caller holds. Each port has a gRPC server of its own, with this gate's check and interceptor
// for that port, so that nothing a caller sends can say at which port a call came in. The gate acts
// at four places:
//  - the credentials check each call by method, role and listener before its message is read;
//  - an interceptor knows the caller for as long as the call lasts, writes the audit line, and
//    removes the server's paths from error messages to callers who may not see them;
//  - a thread checks the access file every second, and ends the calls in flight that it no longer
//    allows;
//  - handlers ask for decisions that depend on the message: quotas, and who may end whose requests.
//    Right before a call takes effect, they ask again whether it is still allowed.
#ifndef ISOBIT_COMMON_ACCESS_CALL_GATE_H_
#define ISOBIT_COMMON_ACCESS_CALL_GATE_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_interceptor.h>

#include <functional>
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
#include "common/access/access_list.h"
#include "common/access/audit_log.h"
#include "common/access/end_call.h"
#include "common/access/quota.h"
#include "common/base/repeating_thread.h"

namespace isobit {

// A port, each of which has a server of its own.
enum class Listener {
  kMain,   // all methods, except admin methods if there is an admin port
  kAdmin,  // admin methods, and health
};

// What a server knows about a call before it reads the message. Valid only during the check.
struct CallFacts {
  absl::string_view method;                        // such as "/isobit.v1.ScorerService/Score"
  std::optional<absl::string_view> authorization;  // the header, if the client sends one
  // The names in the client's certificate, which the handshake has verified: its subject
  // alternative names, or the common name if it has none. Empty without a certificate.
  std::vector<std::string> certificate_names;
};

// OK allows the call; otherwise the client gets the status. Runs on any thread; must not block.
using CallCheck = std::function<absl::Status(const CallFacts&)>;

struct CallGateOptions {
  std::shared_ptr<AccessFile> access = nullptr;  // null: every caller may call everything
  std::shared_ptr<Quota> quota = nullptr;        // null: no bounds
  std::unique_ptr<AuditLog> audit = nullptr;     // null: no audit lines
  bool has_admin_port = false;
};

// Thread-safe.
class CallGate : public std::enable_shared_from_this<CallGate> {
 public:
  // By default every caller may do everything.
  static std::shared_ptr<CallGate> Create(CallGateOptions options = {});

  // Whether calls need a check, and hence credentials that can perform it.
  bool checks_calls() const { return options_.access != nullptr || options_.has_admin_port; }

  // The check for the credentials of that port's server. UNAUTHENTICATED: the call has neither
  // bearer token nor certificate, or the access file does not know them. PERMISSION_DENIED: the
  // client lacks a role, which the message names.
  CallCheck CheckFor(Listener listener);
  // The interceptor factory for the same server.
  // INVARIANT: at the main port nobody has the rights of the admin port, whatever headers a call
  // has (RolesTest.test_no_header_makes_the_port).
  std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> InterceptorFor(
      Listener listener);

  // The methods below are for handlers, with the context of a running call. Without the
  // interceptor, as in tests of one service, all callers are one client who may do everything.

  // Whether the current access file would still allow the call. Ask right before anything takes
  // effect; it costs one look at the file. Errors: those of CheckFor. After an error, the call ends
  // with it, unless it ends with OK. Does not block on gRPC, so the caller may hold any lock.
  // INVARIANT: nothing takes effect for a client that the file no longer names (CallGateTest.*,
  // AccessTest.*).
  absl::Status Recheck(const grpc::ServerContextBase& context);

  // Calls Recheck, then takes `amounts` of the client's quota until the call ends, in addition to
  // what the call already holds. Errors: those of Recheck and Quota::Take.
  absl::Status Admit(const grpc::ServerContextBase& context, const QuotaAmounts& amounts);

  // The client's name in the access file; without an access file, the one that held_bytes.h's
  // ClientOf returns.
  std::string ClientOf(const grpc::ServerContextBase& context) const;

  // Writes the audit line of a running call: AuditLog::Write if `outcome` is OK, else WriteRefused.
  // At its end the call then gets another line only if it is refused later.
  void Audit(const grpc::ServerContextBase& context, std::string method, std::string arguments,
             const absl::Status& outcome);

  // PERMISSION_DENIED: the client, at this listener, may not do what needs the role admin.
  absl::Status CheckAdmin(const grpc::ServerContextBase& context) const;

 private:
  friend class GatedCall;

  // The credentials that a call presents.
  struct Credentials {
    std::optional<std::string> authorization;
    std::vector<std::string> certificate_names;
  };

  // A running call.
  struct Call {
    std::string method;
    Credentials credentials;
    bool is_at_main_port = false;  // there is an admin port, and this is the other
    OpenCall handle;
    std::string client;
    absl::Status admin;  // CheckAdmin's answer
    bool sees_paths = true;
    std::vector<Quota::Lease> leases{};
    std::shared_ptr<const AccessList> list{};  // the list that judged it last
    absl::Status refusal{};                    // why it may not go on, or OK
    bool has_been_ended = false;               // because of `refusal`
    bool has_audit_line = false;               // by Audit
  };

  explicit CallGate(CallGateOptions options);
  absl::Status Check(Listener listener, const CallFacts& facts);
  void Enter(grpc::ServerContextBase& context, const std::string& method, Listener listener);
  // Returns the call's quota and writes its audit line, if `is_audited` and it has none yet.
  // Returns what the client is told: `outcome`, or the call's refusal, without paths that it may
  // not see.
  absl::Status End(const grpc::ServerContextBase& context, absl::Status outcome, bool is_audited,
                   const std::string& arguments);
  void Leave(const grpc::ServerContextBase& context);
  // Decides about the call by the access list; null: there is none. Returns the call's refusal.
  static absl::Status Judge(std::shared_ptr<const AccessList> list, Call& call);

  // Ends calls in flight that the current access file does not allow.
  void EndRefusedCalls();

  const CallGateOptions options_;
  mutable std::mutex mutex_;  // guards what follows
  std::unordered_map<const grpc::ServerContextBase*, Call> calls_;

  // Only with an access file. It may release the last reference to the gate, with the last call
  // that it has ended.
  std::optional<RepeatingThread> watcher_;
};

// `message` with every absolute path in it replaced.
std::string WithoutPaths(absl::string_view message);

}  // namespace isobit

#endif  // ISOBIT_COMMON_ACCESS_CALL_GATE_H_
