// The leader's side of a shard group: waits for the other processes, refuses those that cannot
// belong to the group, and sends each its share of every pass.
#ifndef ISOBIT_TRAINER_BRIDGE_SCORER_GROUP_LEADER_H_
#define ISOBIT_TRAINER_BRIDGE_SCORER_GROUP_LEADER_H_

#include <grpcpp/server.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/access/call_gate.h"
#include "common/rpc/connection_acceptor.h"
#include "isobit/v1/shard_group.grpc.pb.h"
#include "trainer_bridge/scorer/remote_ranks.h"

namespace isobit {

struct GroupLeaderOptions {
  std::string host;     // address to listen on, which the members can reach
  int port = 0;         // 0: the system chooses
  int world_size = 2;   // processes, including this one
  int local_ranks = 1;  // shard ranks of each
  std::string nccl_id;  // sent to the members
  // Who may connect and call; null: every caller, in plain text.
  std::shared_ptr<grpc::ServerCredentials> credentials{};
  std::string secret{};                                 // that members must show; empty: none
  std::shared_ptr<CallGate> gate = CallGate::Create();  // audits each call to join
  std::chrono::milliseconds timeout{120'000};
  // Called once, on any thread, when a joined member leaves or fails. May be null.
  std::function<void(const absl::Status&)> on_lost = nullptr;
  // Called with the port once members can connect. May be null.
  std::function<void(int port)> on_listening = nullptr;
};

class GroupLeader final : public RemoteRanks {
 public:
  // Waits until all members have joined. DEADLINE_EXCEEDED names the missing ones.
  // FAILED_PRECONDITION: a process differs in `identity`, world size or local ranks. UNAVAILABLE:
  // the address cannot be bound.
  static absl::StatusOr<std::shared_ptr<GroupLeader>> Assemble(GroupLeaderOptions options,
                                                               const GroupIdentity& identity);
  // Tells the members goodbye, unless the group has failed; then shuts the server down.
  ~GroupLeader() override;

  absl::Status WaitUntilReady() override;
  absl::Status Prepare(const std::string& model_path, uint64_t version,
                       const std::string& expected_digest, uint64_t serving) override;
  absl::Status CheckDigest(const std::string& digest) override;
  absl::Status Score(const WeightVersion& version,
                     absl::Span<const std::vector<ScoreItem>> items) override;
  void Abort(const absl::Status& reason) override;

 private:
  using Stream = grpc::ServerReaderWriter<v1::LeaderMessage, v1::MemberMessage>;

  class Service final : public v1::ShardGroupService::Service {
   public:
    explicit Service(GroupLeader& leader) : leader_(leader) {}
    grpc::Status Join(grpc::ServerContext* context, Stream* stream) override;

   private:
    GroupLeader& leader_;
  };

  // Another process.
  struct Member {
    std::mutex write_mutex;
    Stream* stream = nullptr;  // while its call lasts; guarded by write_mutex

    bool joined = false;
    std::optional<absl::Status> ready, pass_done, prepared;  // set when it answers
    std::string digest;                                      // of what it loaded or prepared last
  };

  GroupLeader(GroupLeaderOptions options, const GroupIdentity& identity);
  absl::Status Listen();
  absl::Status WaitForMembers();

  // A member's call, from its first message to its end.
  absl::Status Serve(grpc::ServerContext& context, Stream& stream);
  // Reads the caller's first message and admits it to the group; returns its rank. Writes the
  // message's text to `arguments`, for the audit.
  absl::StatusOr<int> AdmitCaller(const grpc::ServerContext& context, Stream& stream,
                                  std::string& arguments);
  // UNAUTHENTICATED: there is a group secret, and the member does not show it.
  absl::Status CheckSecret(const grpc::ServerContext& context) const;
  absl::Status ServeMember(int rank, const grpc::ServerContext& context, Stream& stream);
  absl::StatusOr<int> Admit(const v1::MemberHello& hello, const std::string& address,
                            Stream& stream);
  // Waits until all members have joined. CANCELLED: `waiting` has gone; its rank is free again.
  absl::Status WaitForOthers(Member& waiting, const grpc::ServerContext& context);
  void Handle(int rank, const v1::MemberMessage& message);
  void Deliver(int rank, const v1::SequenceScored& scored);
  // If `status` is an error, a member has gone or failed: ends the group and calls on_lost.
  void LoseUnlessOk(const absl::Status& status);
  // Ends the members' calls with `reason`. False: the group had already ended.
  bool EndWith(const absl::Status& reason);
  void SayGoodbye(bool in_order);
  void Send(Member& member, const v1::LeaderMessage& message);
  // Waits until all members have set `answer` or the group has ended; returns the first error.
  absl::Status WaitForAll(std::optional<absl::Status> Member::*answer);
  Member& member(int rank) { return *members_[static_cast<size_t>(rank - 1)]; }

  const GroupLeaderOptions options_;
  const v1::GroupIdentity identity_;
  Service service_{*this};
  std::unique_ptr<ConnectionAcceptor> acceptor_;
  std::unique_ptr<grpc::Server> server_;

  std::mutex mutex_;  // guards what follows, except the members' streams
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Member>> members_;  // of the ranks 1, 2, ...
  absl::Status failure_;
  WeightVersion pass_version_;
  std::vector<std::vector<ScoreItem>> pass_items_;  // of the current pass
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_GROUP_LEADER_H_
