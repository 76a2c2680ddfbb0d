// Each member's call keeps a thread of the gRPC server for its whole life, since members are few
// and stay. See group_leader.h.
#include "trainer_bridge/scorer/group_leader.h"

#include <grpcpp/server_builder.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/access/access_list.h"
#include "common/access/audit_log.h"
#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "common/rpc/channel.h"
#include "common/rpc/server_runner.h"
#include "common/rpc/steady_time.h"
#include "proto/isobit/status_convert.h"
#include "trainer_bridge/scorer/group_messages.h"

namespace isobit {
namespace {

constexpr char kJoin[] = "/isobit.v1.ShardGroupService/Join";
constexpr std::chrono::seconds kGoodbyeTimeout(5);
constexpr std::chrono::milliseconds kLookInterval(
    100);  // of looks whether a waiting member is gone

}  // namespace

grpc::Status GroupLeader::Service::Join(grpc::ServerContext* context, Stream* stream) {
  return ToGrpcStatus(leader_.Serve(*context, *stream));
}

absl::StatusOr<std::shared_ptr<GroupLeader>> GroupLeader::Assemble(GroupLeaderOptions options,
                                                                   const GroupIdentity& identity) {
  std::shared_ptr<GroupLeader> leader(new GroupLeader(std::move(options), identity));
  ISOBIT_RETURN_IF_ERROR(leader->Listen());
  ISOBIT_RETURN_IF_ERROR(leader->WaitForMembers());
  return leader;
}

GroupLeader::GroupLeader(GroupLeaderOptions options, const GroupIdentity& identity)
    : options_(std::move(options)),
      identity_(MakeGroupIdentity(identity, options_.world_size, options_.local_ranks)) {
  for (int rank = 1; rank < options_.world_size; ++rank) {
    members_.push_back(std::make_unique<Member>());
  }
}

GroupLeader::~GroupLeader() {
  bool in_order = false;
  {
    const std::lock_guard lock(mutex_);
    in_order = failure_.ok();
    if (in_order) failure_ = absl::CancelledError("the shard group has ended");
    changed_.notify_all();
  }
  if (in_order) SayGoodbye(true);
  if (server_ != nullptr) {
    acceptor_->Stop();
    server_->Shutdown(std::chrono::steady_clock::now() + kGoodbyeTimeout);
    server_->Wait();
  }
}

absl::Status GroupLeader::Listen() {
  auto acceptor = ConnectionAcceptor::Listen({.host = options_.host, .port = options_.port});
  if (!acceptor.ok()) return Annotate(acceptor.status(), "shard group");
  acceptor_ = *std::move(acceptor);
  grpc::ServerBuilder builder;
  acceptor_->AttachTo(builder, options_.credentials != nullptr ? options_.credentials
                                                               : grpc::InsecureServerCredentials());
  builder.RegisterService(&service_);
  SetServerArguments(builder, kMaxGroupMessageBytes, kMaxGroupMessageBytes);
  // It ends the call of a member that the access file no longer names, and with it the group.
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> interceptors;
  interceptors.push_back(options_.gate->InterceptorFor(Listener::kAdmin));
  builder.experimental().SetInterceptorCreators(std::move(interceptors));
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) return absl::UnavailableError("shard group: cannot start the server");
  acceptor_->Start();
  ISOBIT_LOG(Info) << "shard group: waiting for " << members_.size() << " processes on "
                   << HostAndPort(options_.host, acceptor_->port());
  if (options_.on_listening) options_.on_listening(acceptor_->port());
  return absl::OkStatus();
}

absl::Status GroupLeader::WaitForMembers() {
  std::unique_lock lock(mutex_);
  std::vector<int> missing;
  const bool in_time = changed_.wait_for(lock, options_.timeout, [&] {
    missing.clear();
    for (size_t i = 0; i < members_.size(); ++i) {
      if (!members_[i]->joined) missing.push_back(static_cast<int>(i) + 1);
    }
    return missing.empty() || !failure_.ok();
  });
  if (in_time) return failure_;
  failure_ = absl::DeadlineExceededError(absl::StrCat(
      "shard group of ", options_.world_size, " processes: within ", options_.timeout.count(),
      " ms these did not come: rank ", absl::StrJoin(missing, ", ")));
  changed_.notify_all();
  return failure_;
}

absl::Status GroupLeader::CheckSecret(const grpc::ServerContext& context) const {
  if (options_.secret.empty()) return absl::OkStatus();
  const auto shown = context.client_metadata().find(kGroupSecretHeader);
  const bool is_right = shown != context.client_metadata().end() &&
                        SameSecret({shown->second.data(), shown->second.size()}, options_.secret);
  if (is_right) return absl::OkStatus();
  return absl::UnauthenticatedError("shard group: expected the group secret of --group_token_file");
}

absl::Status GroupLeader::Serve(grpc::ServerContext& context, Stream& stream) {
  std::string arguments;
  const absl::StatusOr<int> rank = AdmitCaller(context, stream, arguments);
  // Now, not at the end of the call, which lasts as long as the scorer.
  options_.gate->Audit(context, kJoin, std::move(arguments), rank.status());
  ISOBIT_RETURN_IF_ERROR(rank.status());
  Member& from = member(*rank);
  const absl::Status status = ServeMember(*rank, context, stream);
  const std::lock_guard lock(from.write_mutex);
  if (from.stream == &stream) from.stream = nullptr;
  return status;
}

absl::StatusOr<int> GroupLeader::AdmitCaller(const grpc::ServerContext& context, Stream& stream,
                                             std::string& arguments) {
  ISOBIT_RETURN_IF_ERROR(CheckSecret(context));
  v1::MemberMessage message;
  if (!stream.Read(&message) || !message.has_hello()) {
    return absl::InvalidArgumentError("shard group: expected a hello");
  }
  arguments = BoundedText(message.hello());
  return Admit(message.hello(), context.peer(), stream);
}

absl::Status GroupLeader::ServeMember(int rank, const grpc::ServerContext& context,
                                      Stream& stream) {
  ISOBIT_RETURN_IF_ERROR(WaitForOthers(member(rank), context));
  v1::LeaderMessage welcome;
  welcome.mutable_welcome()->set_nccl_id(options_.nccl_id);
  Send(member(rank), welcome);
  v1::MemberMessage message;
  while (stream.Read(&message)) Handle(rank, message);
  LoseUnlessOk(absl::UnavailableError(absl::StrCat("shard group: rank ", rank, " has gone")));
  const std::lock_guard lock(mutex_);
  return failure_;
}

absl::Status GroupLeader::WaitForOthers(Member& waiting, const grpc::ServerContext& context) {
  std::unique_lock lock(mutex_);
  const auto all_here = [this] {
    return !failure_.ok() ||
           std::all_of(members_.begin(), members_.end(), [](const auto& m) { return m->joined; });
  };
  while (!changed_.wait_for(lock, kLookInterval, all_here)) {
    if (!context.IsCancelled()) continue;
    waiting.joined = false;
    return absl::CancelledError("shard group: the member left before all had joined");
  }
  return failure_;
}

absl::StatusOr<int> GroupLeader::Admit(const v1::MemberHello& hello, const std::string& address,
                                       Stream& stream) {
  const std::string who = absl::StrCat("shard group, rank ", hello.rank(), " at ", address);
  absl::Status status = Annotate(CheckSameGroup(identity_, hello.identity()), who);
  const std::lock_guard lock(mutex_);
  if (!failure_.ok()) return failure_;
  if (status.ok() && (hello.rank() < 1 || hello.rank() >= options_.world_size)) {
    status = absl::FailedPreconditionError(
        absl::StrCat(who, ": expected 1 to ", options_.world_size - 1));
  }
  if (!status.ok()) {
    failure_ = status;
    changed_.notify_all();
    return status;
  }
  Member& newcomer = member(hello.rank());
  if (newcomer.joined) {
    return absl::AlreadyExistsError(absl::StrCat(who, ": another process has that rank"));
  }
  {
    const std::lock_guard write_lock(newcomer.write_mutex);
    newcomer.stream = &stream;
  }
  newcomer.joined = true;
  ISOBIT_LOG(Info) << who << ": joined";
  changed_.notify_all();
  return hello.rank();
}

void GroupLeader::Handle(int rank, const v1::MemberMessage& message) {
  if (message.has_scored()) return Deliver(rank, message.scored());
  const auto told = [rank](const v1::Outcome& outcome) {
    return Annotate(StatusOf(outcome), absl::StrCat("shard group, rank ", rank));
  };
  // At once: otherwise other ranks would wait in a gather for the failed one until their timeout.
  if (message.has_ready()) LoseUnlessOk(told(message.ready().outcome()));
  if (message.has_pass_done()) LoseUnlessOk(told(message.pass_done()));
  const std::lock_guard lock(mutex_);
  Member& from = member(rank);
  if (message.has_ready()) {
    from.digest = message.ready().digest();
    from.ready = told(message.ready().outcome());
  }
  if (message.has_pass_done()) from.pass_done = told(message.pass_done());
  if (message.has_staged()) {
    from.digest = message.staged().digest();
    from.prepared = told(message.staged().outcome());
  }
  changed_.notify_all();
}

void GroupLeader::Deliver(int rank, const v1::SequenceScored& scored) {
  std::unique_lock lock(mutex_);
  const auto local = static_cast<size_t>(scored.rank());
  const auto index = static_cast<size_t>(scored.index());
  const size_t first = static_cast<size_t>(rank - 1) * static_cast<size_t>(options_.local_ranks);
  if (first + local >= pass_items_.size() || index >= pass_items_[first + local].size()) return;
  const ScoreItem item = pass_items_[first + local][index];
  const WeightVersion version = pass_version_;
  lock.unlock();
  if (scored.outcome().code() != 0) {
    item.job->End(StatusOf(scored.outcome()));
    return;
  }
  SequenceScore score = ScoreOf(scored);
  score.index = item.index;
  score.version = version;
  item.job->Deliver(std::move(score));
}

void GroupLeader::LoseUnlessOk(const absl::Status& status) {
  if (!status.ok() && EndWith(status) && options_.on_lost) options_.on_lost(status);
}

void GroupLeader::Abort(const absl::Status& reason) { EndWith(reason); }

bool GroupLeader::EndWith(const absl::Status& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.ok()) return false;
    failure_ = reason;
    changed_.notify_all();
  }
  SayGoodbye(false);
  return true;
}

void GroupLeader::SayGoodbye(bool in_order) {
  v1::LeaderMessage goodbye;
  goodbye.set_goodbye(in_order);
  for (const auto& member : members_) Send(*member, goodbye);
}

// If the write fails, the member's call has ended, and the call's thread reports it.
void GroupLeader::Send(Member& member, const v1::LeaderMessage& message) {
  const std::lock_guard lock(member.write_mutex);
  if (member.stream != nullptr) member.stream->Write(message);
}

absl::Status GroupLeader::WaitForAll(std::optional<absl::Status> Member::*answer) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] {
    return !failure_.ok() || std::all_of(members_.begin(), members_.end(), [answer](const auto& m) {
      return ((*m).*answer).has_value();
    });
  });
  ISOBIT_RETURN_IF_ERROR(failure_);
  for (const auto& member : members_) ISOBIT_RETURN_IF_ERROR(*((*member).*answer));
  return absl::OkStatus();
}

absl::Status GroupLeader::WaitUntilReady() { return WaitForAll(&Member::ready); }

absl::Status GroupLeader::Prepare(const std::string& model_path, uint64_t version,
                                  const std::string& expected_digest, uint64_t serving) {
  {
    const std::lock_guard lock(mutex_);
    ISOBIT_RETURN_IF_ERROR(failure_);
    for (const auto& member : members_) member->prepared.reset();
  }
  v1::LeaderMessage order;
  order.mutable_stage()->set_model_path(model_path);
  order.mutable_stage()->set_weight_version(version);
  order.mutable_stage()->set_expected_digest(expected_digest);
  order.mutable_stage()->set_serving_version(serving);
  for (const auto& member : members_) Send(*member, order);
  return WaitForAll(&Member::prepared);
}

absl::Status GroupLeader::CheckDigest(const std::string& digest) {
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < members_.size(); ++i) {
    if (members_[i]->digest == digest) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("shard group, rank ", i + 1, ": digest of the weights: the leader has ",
                     digest, ", the member ", members_[i]->digest));
  }
  return absl::OkStatus();
}

absl::Status GroupLeader::Score(const WeightVersion& version,
                                absl::Span<const std::vector<ScoreItem>> items) {
  {
    const std::lock_guard lock(mutex_);
    ISOBIT_RETURN_IF_ERROR(failure_);
    for (const auto& member : members_) member->pass_done.reset();
    pass_version_ = version;
    pass_items_.assign(items.begin(), items.end());
  }
  size_t next = 0;
  for (const auto& member : members_) {
    v1::LeaderMessage order;
    order.mutable_run_pass()->set_weight_version(version.id);
    for (int r = 0; r < options_.local_ranks; ++r) {
      v1::RankWork& work = *order.mutable_run_pass()->add_ranks();
      for (const ScoreItem& item : items[next++]) *work.add_items() = MakeWorkItem(item);
    }
    Send(*member, order);
  }
  const absl::Status status = WaitForAll(&Member::pass_done);
  const std::lock_guard lock(mutex_);
  pass_items_.clear();
  return status;
}

}  // namespace isobit
