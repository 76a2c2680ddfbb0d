// Shard groups whose processes are threads of a test, over loopback gRPC, with two tiny models.
#ifndef ISOBIT_TESTS_TRAINER_BRIDGE_SCORER_SHARD_GROUP_FIXTURE_H_
#define ISOBIT_TESTS_TRAINER_BRIDGE_SCORER_SHARD_GROUP_FIXTURE_H_

#include <chrono>
#include <cstddef>
#include <future>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/model_config.h"
#include "common/parallel/thread_group.h"
#include "gtest/gtest.h"
#include "tests/support/temp_dir.h"
#include "trainer_bridge/scorer/group_leader.h"
#include "trainer_bridge/scorer/group_member.h"
#include "trainer_bridge/scorer/remote_ranks.h"
#include "trainer_bridge/scorer/scorer.h"

namespace isobit {

// How long a test waits for what must come.
inline constexpr std::chrono::milliseconds kPatience(60'000);

class ShardGroupFixture : public testing::Test {
 protected:
  // Writes the models `first` and `second`, which differ in their weights alone.
  ShardGroupFixture();

  // Of a scorer with one rank in one process.
  ScorerOptions Options() const;
  // A process's backend, whose first rank is `first_rank`. The ranks of all processes exchange
  // their shards in `group`.
  static RankBackend BackendOf(ThreadGroup& group, int first_rank);
  // Of a leader that listens on a free port. Its loss of a member sets lost_.
  GroupLeaderOptions LeaderOptions(int world_size, std::chrono::milliseconds timeout = kPatience);
  // Of the scorer that leads a group whose ranks exchange their shards in `group`.
  ScorerOptions LeadingOptions(ThreadGroup& group, int world_size, int local_ranks);
  // Of a member that loads `first`. Its backend is an error: for tests in which no pass runs.
  GroupMemberOptions MemberOptions(int rank, int world_size);
  // What every process of a group that serves `first` must have.
  GroupIdentity First() const;

  // Waits until the leader listens.
  int PortOfLeader() const { return listening_.get(); }
  // Call it before each further leader of a test.
  void ForgetLeader();

  static std::future<absl::StatusOr<std::unique_ptr<Scorer>>> Load(ScorerOptions options);
  // A leader of `first`, which only waits for its members.
  std::future<absl::Status> Assemble(GroupLeaderOptions options) const;

  const testing_support::TempDir dir_;
  const ModelConfig config_;
  std::promise<absl::Status> lost_;
  std::promise<int> port_;
  std::shared_future<int> listening_ = port_.get_future().share();
};

// The members of a group, each in a thread, and what their ranks exchange shards in.
class RunningGroup {
 public:
  RunningGroup(int world_size, int local_ranks) : group_(world_size * local_ranks) {}

  ThreadGroup& threads() { return group_; }
  void StartMember(GroupMemberOptions options);
  // i: by the order of their starts, from 0.
  GroupMember& member(size_t i) { return *members_[i]; }
  // Waits until member i ends, and returns what its Run did.
  absl::Status End(size_t i) { return ends_[i].get(); }
  size_t size() const { return ends_.size(); }

 private:
  ThreadGroup group_;
  std::vector<std::unique_ptr<GroupMember>> members_;
  std::vector<std::future<absl::Status>> ends_;
};

}  // namespace isobit

#endif  // ISOBIT_TESTS_TRAINER_BRIDGE_SCORER_SHARD_GROUP_FIXTURE_H_
