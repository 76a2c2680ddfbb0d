// Leader and members, and their threads.
#include "tests/trainer_bridge/scorer/shard_group_fixture.h"

#include <string>
#include <utility>

#include "common/parallel/host_block_gather.h"
#include "kernels/model/numerics.h"
#include "kernels/oracle/oracle_backend.h"
#include "tests/support/tiny_model.h"

namespace isobit {

ShardGroupFixture::ShardGroupFixture()
    : config_(testing_support::TinyConfig(Architecture::kQwen3)) {
  testing_support::WriteTinyModel(config_, 1, dir_.File("first"));
  testing_support::WriteTinyModel(config_, 2, dir_.File("second"));
}

ScorerOptions ShardGroupFixture::Options() const {
  ScorerOptions options;
  options.model_root = dir_.path();
  options.num_shards = 1;
  options.max_batch_tokens = 64;
  options.backend.make_ops = [](int) { return MakeOracleBackend(); };
  return options;
}

RankBackend ShardGroupFixture::BackendOf(ThreadGroup& group, int first_rank) {
  return {.make_ops = [](int) { return MakeOracleBackend(); },
          .make_gather =
              [&group, first_rank](int rank, size_t bytes) {
                return std::make_unique<HostBlockGather>(group.rank(first_rank + rank), bytes);
              }};
}

GroupLeaderOptions ShardGroupFixture::LeaderOptions(int world_size,
                                                    std::chrono::milliseconds timeout) {
  return {.host = "127.0.0.1",
          .world_size = world_size,
          .local_ranks = 1,
          .nccl_id = "id",
          .timeout = timeout,
          .on_lost = [this](const absl::Status& status) { lost_.set_value(status); },
          .on_listening = [this](int port) { port_.set_value(port); }};
}

ScorerOptions ShardGroupFixture::LeadingOptions(ThreadGroup& group, int world_size,
                                                int local_ranks) {
  ScorerOptions options = Options();
  options.num_shards = world_size * local_ranks;
  options.local_shards = local_ranks;
  options.backend.make_gather = BackendOf(group, 0).make_gather;
  GroupLeaderOptions leader = LeaderOptions(world_size);
  leader.local_ranks = local_ranks;
  options.assemble = [leader](const GroupIdentity& identity) {
    return GroupLeader::Assemble(leader, identity);
  };
  return options;
}

GroupMemberOptions ShardGroupFixture::MemberOptions(int rank, int world_size) {
  return {.leader = "127.0.0.1:" + std::to_string(PortOfLeader()),
          .rank = rank,
          .world_size = world_size,
          .timeout = kPatience,
          .model = "first",
          .scorer = Options(),
          .make_backend = [](const std::string&) -> absl::StatusOr<RankBackend> {
            return absl::InternalError("no pass was expected");
          }};
}

GroupIdentity ShardGroupFixture::First() const {
  return {.fingerprint = FingerprintOf(config_, NumericsMode::kTree),
          .settings = config_.Settings(),
          .max_context = config_.max_position_embeddings};
}

void ShardGroupFixture::ForgetLeader() {
  port_ = {};
  listening_ = port_.get_future().share();
}

std::future<absl::StatusOr<std::unique_ptr<Scorer>>> ShardGroupFixture::Load(
    ScorerOptions options) {
  return std::async(std::launch::async,
                    [options = std::move(options)] { return Scorer::Load(options, "first"); });
}

std::future<absl::Status> ShardGroupFixture::Assemble(GroupLeaderOptions options) const {
  return std::async(std::launch::async, [options = std::move(options), first = First()] {
    return GroupLeader::Assemble(options, first).status();
  });
}

void RunningGroup::StartMember(GroupMemberOptions options) {
  members_.push_back(std::make_unique<GroupMember>(std::move(options)));
  ends_.push_back(
      std::async(std::launch::async, [member = members_.back().get()] { return member->Run(); }));
}

}  // namespace isobit
