// A member's side of a shard group: joins the leader, computes its share of each pass and loads the
// weights that the leader names, until the group ends.
#ifndef ISOBIT_TRAINER_BRIDGE_SCORER_GROUP_MEMBER_H_
#define ISOBIT_TRAINER_BRIDGE_SCORER_GROUP_MEMBER_H_

#include <grpcpp/client_context.h>
#include <grpcpp/support/sync_stream.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/rpc/channel_security.h"
#include "isobit/v1/shard_group.grpc.pb.h"
#include "kernels/runtime/rank_backend.h"
#include "trainer_bridge/scorer/scorer.h"
#include "trainer_bridge/scorer/shard_ranks.h"

namespace isobit {

struct GroupMemberOptions {
  std::string leader;   // host:port
  int rank = 1;         // of this process, in [1, world_size)
  int world_size = 2;   // processes
  int local_ranks = 1;  // shard ranks of each
  std::chrono::milliseconds timeout{120'000};
  ChannelSecurity security{};  // of the channel to the leader
  std::string secret{};        // shown to the leader; empty: none
  std::string model;           // path from scorer.model_root
  // Used of these: model_root, load_format, load_policy, numerics, max_context, max_batch_tokens,
  // chunk_rows and prefix_sharing.
  ScorerOptions scorer;
  // Makes the backend once the group's id is known.
  std::function<absl::StatusOr<RankBackend>(const std::string& nccl_id)> make_backend;
  // Called once, when the first weights are loaded. May be null.
  std::function<void()> on_ready = nullptr;
};

class GroupMember {
 public:
  explicit GroupMember(GroupMemberOptions options) : options_(std::move(options)) {}
  GroupMember(const GroupMember&) = delete;
  GroupMember& operator=(const GroupMember&) = delete;

  // Joins and serves until the group ends. Call it once. OK: the leader said goodbye. UNAVAILABLE:
  // no leader came within the timeout, or it has gone. Other errors: the leader's refusal, or this
  // process's own. Weights may still be loading when it returns; the destructor waits for them.
  absl::Status Run();

  // Ends Run and the group. Any thread may call it.
  void Cancel();

 private:
  class Forwarder;

  absl::Status Join(const GroupIdentity& identity);
  absl::Status Load(const OpenedModel& model, int64_t max_context, const std::string& nccl_id);
  // Carries out the leader's orders until the stream ends. True: the last one was its goodbye.
  bool Obey();
  void RunPass(const v1::RunPass& order);
  absl::Status Score(const v1::RunPass& order);
  void Prepare(const v1::StageWeights& order);
  // The weights that serve. If the prepared ones are `version`, they serve from now on.
  std::shared_ptr<const ShardedVersion> Serving(uint64_t version);
  // Sends nothing after EndWrites, when a pass may still be running.
  void Send(const v1::MemberMessage& message);
  void EndWrites();

  const GroupMemberOptions options_;
  grpc::ClientContext context_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::ShardGroupService::Stub> stub_;
  std::mutex write_mutex_;  // guards the writing half of the stream
  std::unique_ptr<grpc::ClientReaderWriter<v1::MemberMessage, v1::LeaderMessage>> stream_;
  bool writes_ended_ = false;
  std::unique_ptr<ShardRanks> ranks_;

  std::mutex mutex_;  // guards what follows
  std::shared_ptr<const ShardedVersion> serving_, prepared_;
  absl::Status failure_;  // of a pass

  std::future<void> pass_, preparation_;  // at most one each
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_SCORER_GROUP_MEMBER_H_
