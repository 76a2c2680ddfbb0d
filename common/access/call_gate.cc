// Judges calls by the access file and the port, from their headers to their end.
#include "common/access/call_gate.h"

#include <grpc/grpc_security_constants.h>

#include <chrono>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/access/held_bytes.h"
#include "common/access/method_roles.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "isobit/v1/rollout.pb.h"
#include "proto/isobit/status_convert.h"

namespace isobit {
namespace {

constexpr char kAbort[] = "/isobit.v1.RolloutService/Abort";
constexpr char kVllmAbort[] = "/vllm.grpc.engine.VllmEngine/Abort";
constexpr std::chrono::seconds kLookInterval(1);  // of looks at the access file

// The access file's client that calls; an error says why it is none.
absl::StatusOr<const AccessClient*> Authenticate(const AccessList& list,
                                                 std::optional<absl::string_view> authorization,
                                                 absl::Span<const std::string> certificate_names) {
  if (authorization) {  // then the certificate does not count
    absl::string_view token = *authorization;
    const bool is_bearer =
        token.size() > 7 && absl::EqualsIgnoreCase(token.substr(0, 7), "bearer ");
    const AccessClient* const client = is_bearer ? list.ByToken(token.substr(7)) : nullptr;
    if (client != nullptr) return client;
    return absl::UnauthenticatedError(
        "authorization: expected \"Bearer \" and a token that the access file knows");
  }
  if (certificate_names.empty()) {
    return absl::UnauthenticatedError("expected a bearer token or a client certificate");
  }
  const AccessClient* const client = list.ByCertificate(certificate_names);
  if (client != nullptr) return client;
  return absl::UnauthenticatedError(absl::StrCat(
      "the access file does not know the certificate of \"", certificate_names.front(), "\""));
}

absl::Status LacksRole(absl::string_view client, RoleSet needed, absl::string_view what) {
  return absl::PermissionDeniedError(absl::StrCat("client \"", client, "\" lacks the role ",
                                                  needed.Names(), ", which ", what, " takes"));
}

absl::Status CheckRole(const AccessClient& client, absl::string_view method) {
  const RoleSet needed = RolesFor(method);
  return client.roles.HasAnyOf(needed) ? absl::OkStatus() : LacksRole(client.name, needed, method);
}

absl::Status WrongPort(absl::string_view what, Listener listener) {
  return absl::PermissionDeniedError(absl::StrCat(
      what, listener == Listener::kMain ? ": expected at the admin port" : ": not at this port"));
}

std::vector<std::string> CertificateNames(const grpc::ServerContextBase& context) {
  std::vector<std::string> names;
  const auto auth = context.auth_context();
  if (auth == nullptr || !auth->IsPeerAuthenticated()) return names;
  const auto transport = auth->FindPropertyValues(GRPC_TRANSPORT_SECURITY_TYPE_PROPERTY_NAME);
  if (transport.size() != 1 || transport.front() != GRPC_SSL_TRANSPORT_SECURITY_TYPE) return names;
  for (const grpc::string_ref& name : auth->GetPeerIdentity()) {
    names.emplace_back(name.data(), name.size());
  }
  return names;
}

}  // namespace

// One call, from its headers to its end: gRPC makes it with the call and destroys it with it.
class GatedCall final : public grpc::experimental::Interceptor {
 public:
  GatedCall(std::shared_ptr<CallGate> gate, Listener listener,
            grpc::experimental::ServerRpcInfo* info)
      : gate_(std::move(gate)),
        listener_(listener),
        context_(*info->server_context()),
        method_(info->method()),
        is_audited_(IsAdminMethod(method_)) {}
  ~GatedCall() override { gate_->Leave(context_); }

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    using Point = grpc::experimental::InterceptionHookPoints;
    if (methods->QueryInterceptionHookPoint(Point::POST_RECV_INITIAL_METADATA)) {
      gate_->Enter(context_, method_, listener_);
    }
    if (methods->QueryInterceptionHookPoint(Point::POST_RECV_MESSAGE)) {
      Look(methods->GetRecvMessage());
    }
    if (methods->QueryInterceptionHookPoint(Point::PRE_SEND_STATUS)) {
      const absl::Status outcome = FromGrpcStatus(methods->GetSendStatus());
      const absl::Status told = gate_->End(context_, outcome, is_audited_, arguments_);
      if (told != outcome) methods->ModifySendStatus(ToGrpcStatus(told));
    }
    methods->Proceed();
  }

 private:
  void Look(const void* message) {
    if (message == nullptr) return;
    // Every message of ours derives from google::protobuf::Message as its first base, so that the
    // pointers are equal.
    if (method_ == kAbort) {
      // An admin may end anybody's requests. Others may end their own, without an audit line; their
      // attempt to end all has one.
      is_audited_ =
          static_cast<const v1::AbortRequest*>(message)->all() || gate_->CheckAdmin(context_).ok();
    } else if (method_ == kVllmAbort) {
      is_audited_ = gate_->CheckAdmin(context_).ok();
    }
    // Of a stream, the first message.
    if (is_audited_ && arguments_.empty()) {
      arguments_ = BoundedText(*static_cast<const google::protobuf::Message*>(message));
    }
  }

  const std::shared_ptr<CallGate> gate_;
  const Listener listener_;
  grpc::ServerContextBase& context_;
  const std::string method_;
  bool is_audited_;
  std::string arguments_;
};

namespace {

class GatedCalls final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  GatedCalls(std::shared_ptr<CallGate> gate, Listener listener)
      : gate_(std::move(gate)), listener_(listener) {}

  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override {
    return IsOpenToAll(info->method()) ? nullptr : new GatedCall(gate_, listener_, info);
  }

 private:
  const std::shared_ptr<CallGate> gate_;
  const Listener listener_;
};

}  // namespace

std::shared_ptr<CallGate> CallGate::Create(CallGateOptions options) {
  std::shared_ptr<CallGate> gate(new CallGate(std::move(options)));
  if (gate->options_.access != nullptr) {
    gate->watcher_.emplace(kLookInterval, [weak = gate->weak_from_this()] {
      if (const auto gate = weak.lock()) gate->EndRefusedCalls();
    });
  }
  return gate;
}

CallGate::CallGate(CallGateOptions options) : options_(std::move(options)) {}

void CallGate::EndRefusedCalls() {
  const std::shared_ptr<const AccessList> list = options_.access->Current();
  std::vector<std::pair<OpenCall, absl::Status>> refused;
  {
    const std::lock_guard lock(mutex_);
    for (auto& [context, call] : calls_) {
      const absl::Status refusal = Judge(list, call);
      if (refusal.ok() || std::exchange(call.has_been_ended, true)) continue;
      refused.emplace_back(call.handle, refusal);
    }
  }
  if (refused.empty()) return;
  ISOBIT_LOG(Info) << "the access file lets " << refused.size()
                   << " calls in flight go on no longer, the first because "
                   << refused.front().second.message();
  // Without the lock: handlers that see the end ask the gate.
  for (const auto& [call, refusal] : refused) EndCall(call, refusal);
}

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> CallGate::InterceptorFor(
    Listener listener) {
  return std::make_unique<GatedCalls>(shared_from_this(), listener);
}

CallCheck CallGate::CheckFor(Listener listener) {
  return [gate = shared_from_this(), listener](const CallFacts& facts) {
    return gate->Check(listener, facts);
  };
}

absl::Status CallGate::Check(Listener listener, const CallFacts& facts) {
  if (IsOpenToAll(facts.method)) return absl::OkStatus();
  absl::Status refusal;
  std::string client;
  if (options_.access != nullptr) {
    const std::shared_ptr<const AccessList> list = options_.access->Current();
    const auto caller = Authenticate(*list, facts.authorization, facts.certificate_names);
    refusal = caller.ok() ? CheckRole(**caller, facts.method) : caller.status();
    if (caller.ok()) client = (*caller)->name;
  }
  const bool is_here = listener == Listener::kAdmin ? RolesFor(facts.method).Has(CallerRole::kAdmin)
                                                    : !IsAdminMethod(facts.method);
  if (refusal.ok() && options_.has_admin_port && !is_here) {
    refusal = WrongPort(facts.method, listener);
  }
  if (!refusal.ok() && IsAdminMethod(facts.method) && options_.audit != nullptr) {
    options_.audit->WriteRefused({.client = client,
                                  .caller_address = "",
                                  .method = absl::StrCat(facts.method),
                                  .arguments = "",
                                  .outcome = refusal});
  }
  return refusal;
}

absl::Status CallGate::Judge(std::shared_ptr<const AccessList> list, Call& call) {
  if (!call.refusal.ok() || (list != nullptr && list == call.list)) return call.refusal;
  RoleSet roles(CallerRole::kAdmin, CallerRole::kWatch);
  if (list != nullptr) {
    const auto caller =
        Authenticate(*list, call.credentials.authorization, call.credentials.certificate_names);
    call.refusal = caller.ok() ? CheckRole(**caller, call.method) : caller.status();
    roles = call.refusal.ok() ? (*caller)->roles : RoleSet();
    // The name stays what it was at first: quotas and audit lines are of one client.
    if (call.list == nullptr && caller.ok()) call.client = (*caller)->name;
  }
  call.list = std::move(list);
  call.sees_paths = roles.HasAnyOf(RoleSet(CallerRole::kWatch, CallerRole::kAdmin));
  call.admin = absl::OkStatus();
  if (!roles.Has(CallerRole::kAdmin)) {
    call.admin = LacksRole(call.client, RoleSet(CallerRole::kAdmin), "this");
  } else if (call.is_at_main_port) {
    call.admin = WrongPort("this", Listener::kMain);
  }
  return call.refusal;
}

void CallGate::Enter(grpc::ServerContextBase& context, const std::string& method,
                     Listener listener) {
  Call call;
  call.method = method;
  call.handle = OpenCallOf(context);
  call.client = isobit::ClientOf(context);
  call.is_at_main_port = options_.has_admin_port && listener == Listener::kMain;
  if (options_.access != nullptr) {
    const auto& headers = context.client_metadata();
    if (const auto header = headers.find("authorization"); header != headers.end()) {
      call.credentials.authorization.emplace(header->second.data(), header->second.size());
    }
    call.credentials.certificate_names = CertificateNames(context);
  }
  // The check has admitted the call, but the access file may have changed since: a unary call comes
  // here with its message, which may be an hour behind its headers.
  const absl::Status refusal =
      Judge(options_.access != nullptr ? options_.access->Current() : nullptr, call);
  call.has_been_ended = !refusal.ok();
  const OpenCall handle = call.handle;
  {
    const std::lock_guard lock(mutex_);
    calls_.insert_or_assign(&context, std::move(call));
  }
  // The handler, which comes next, sees a call that is cancelled, and asks Recheck.
  if (!refusal.ok()) EndCall(handle, refusal);
}

absl::Status CallGate::Recheck(const grpc::ServerContextBase& context) {
  if (options_.access == nullptr) return absl::OkStatus();
  std::shared_ptr<const AccessList> list = options_.access->Current();
  const std::lock_guard lock(mutex_);
  const auto call = calls_.find(&context);
  return call == calls_.end() ? absl::OkStatus() : Judge(std::move(list), call->second);
}

absl::Status CallGate::End(const grpc::ServerContextBase& context, absl::Status outcome,
                           bool is_audited, const std::string& arguments) {
  AuditEntry entry;
  bool is_admin = false, sees_paths = true;
  {
    const std::lock_guard lock(mutex_);
    const auto found = calls_.find(&context);
    if (found == calls_.end()) return outcome;
    Call& call = found->second;
    // Before the client sees the end: its next call must not find the quota still taken.
    call.leases.clear();
    // What has taken effect is told and noted as it is. What has not ends as a new call would.
    const bool is_refused = !outcome.ok() && !call.refusal.ok();
    if (is_refused) outcome = call.refusal;
    if (call.has_audit_line && !is_refused) is_audited = false;
    // Anybody can try to abort all requests. A method for admins alone has let an admin in.
    is_admin = IsAdminMethod(call.method) || call.admin.ok();
    sees_paths = call.sees_paths;
    if (is_audited) entry = {call.client, context.peer(), call.method, arguments, outcome};
  }
  if (is_audited && options_.audit != nullptr) {
    is_admin ? options_.audit->Write(entry) : options_.audit->WriteRefused(entry);
  }
  if (outcome.ok() || sees_paths) return outcome;
  return absl::Status(outcome.code(), WithoutPaths(outcome.message()));
}

void CallGate::Leave(const grpc::ServerContextBase& context) {
  decltype(calls_)::node_type gone;  // freed without the lock, as gRPC's call may go with it
  const std::lock_guard lock(mutex_);
  gone = calls_.extract(&context);
}

absl::Status CallGate::Admit(const grpc::ServerContextBase& context, const QuotaAmounts& amounts) {
  ISOBIT_RETURN_IF_ERROR(Recheck(context));
  if (options_.quota == nullptr) return absl::OkStatus();
  const std::lock_guard lock(mutex_);
  const auto call = calls_.find(&context);
  if (call == calls_.end()) return absl::OkStatus();
  absl::StatusOr<Quota::Lease> lease = options_.quota->Take(call->second.client, amounts);
  if (!lease.ok()) return lease.status();
  call->second.leases.push_back(*std::move(lease));
  return absl::OkStatus();
}

void CallGate::Audit(const grpc::ServerContextBase& context, std::string method,
                     std::string arguments, const absl::Status& outcome) {
  if (options_.audit == nullptr) return;
  {
    const std::lock_guard lock(mutex_);
    if (const auto call = calls_.find(&context); call != calls_.end()) {
      call->second.has_audit_line = true;
    }
  }
  const AuditEntry entry = {.client = ClientOf(context),
                            .caller_address = context.peer(),
                            .method = std::move(method),
                            .arguments = std::move(arguments),
                            .outcome = outcome};
  outcome.ok() ? options_.audit->Write(entry) : options_.audit->WriteRefused(entry);
}

std::string CallGate::ClientOf(const grpc::ServerContextBase& context) const {
  const std::lock_guard lock(mutex_);
  const auto call = calls_.find(&context);
  return call == calls_.end() ? isobit::ClientOf(context) : call->second.client;
}

absl::Status CallGate::CheckAdmin(const grpc::ServerContextBase& context) const {
  const std::lock_guard lock(mutex_);
  const auto call = calls_.find(&context);
  return call == calls_.end() ? absl::OkStatus() : call->second.admin;
}

std::string WithoutPaths(absl::string_view message) {
  std::string text;
  bool in_path = false, after_word = false;
  for (size_t i = 0; i < message.size(); ++i) {
    const char c = message[i];
    const bool is_word = absl::ascii_isgraph(static_cast<unsigned char>(c)) &&
                         !absl::StrContains("\"'`,;:()<>[]{}=", absl::string_view(&c, 1));
    if (in_path && is_word) continue;
    const bool has_name =
        i + 1 < message.size() && absl::ascii_isgraph(static_cast<unsigned char>(message[i + 1]));
    in_path = c == '/' && !after_word && has_name;
    if (in_path) {
      text += "(path)";
    } else {
      text.push_back(c);
    }
    after_word = is_word && !in_path;
  }
  return text;
}

}  // namespace isobit
