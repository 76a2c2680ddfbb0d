// A scorer of several processes, which are threads here, over loopback gRPC: who may join, what
// they compute together, and how the group ends.
#include <cstdlib>
#include <fstream>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/status_macros.h"
#include "common/parallel/host_block_gather.h"
#include "common/parallel/thread_group.h"
#include "common/rpc/channel.h"
#include "common/rpc/channel_security.h"
#include "common/rpc/server_security.h"
#include "common/rpc/status_convert.h"
#include "gtest/gtest.h"
#include "kernels/model/numerics.h"
#include "kernels/oracle/oracle_ops.h"
#include "tests/support/forwarding_ops.h"
#include "tests/support/observed_packer.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_model.h"
#include "tests/trainer_bridge/scorer/pass_gate.h"
#include "tests/trainer_bridge/scorer/scoring_fixture.h"
#include "trainer_bridge/scorer/group_leader.h"
#include "trainer_bridge/scorer/group_member.h"
#include "trainer_bridge/scorer/group_messages.h"

namespace isobit {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::HasSubstr;
using testing_support::StatusIs;

constexpr milliseconds kPatience(60'000);

class ShardGroupTest : public testing::Test {
 protected:
  ShardGroupTest() : config_(testing_support::TinyConfig(Architecture::kQwen3)) {
    testing_support::WriteTinyModel(config_, 1, dir_.File("first"));
    testing_support::WriteTinyModel(config_, 2, dir_.File("second"));
  }

  ScorerOptions Options() const {
    ScorerOptions options;
    options.model_root = dir_.path();
    options.num_shards = 1;
    options.max_batch_tokens = 64;
    options.backend.make_ops = [](int) { return MakeOracleOps(); };
    return options;
  }

  // A backend whose ranks, of all processes, meet in `group`.
  static RankBackend Backend(ThreadGroup& group, int first_rank) {
    return {.make_ops = [](int) { return MakeOracleOps(); },
            .make_gather =
                [&group, first_rank](int rank, size_t bytes) {
                  return std::make_unique<HostBlockGather>(group.rank(first_rank + rank), bytes);
                }};
  }

  GroupLeaderOptions LeaderOptions(int world_size, milliseconds timeout = kPatience) {
    return {.host = "127.0.0.1",
            .world_size = world_size,
            .local_ranks = 1,
            .nccl_id = "id",
            .timeout = timeout,
            .on_lost = [this](const absl::Status& status) { lost_.set_value(status); },
            .on_listening = [this](int port) { port_.set_value(port); }};
  }

  // Of the scorer that leads a group whose ranks meet in `group`.
  ScorerOptions LeadingOptions(ThreadGroup& group, int world_size, int local_ranks) {
    ScorerOptions options = Options();
    options.num_shards = world_size * local_ranks;
    options.local_shards = local_ranks;
    options.backend.make_gather = Backend(group, 0).make_gather;
    GroupLeaderOptions leader = LeaderOptions(world_size);
    leader.local_ranks = local_ranks;
    options.assemble = [leader](const GroupIdentity& identity) {
      return GroupLeader::Assemble(leader, identity);
    };
    return options;
  }

  GroupMemberOptions MemberOptions(int rank, int world_size) {
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

  int PortOfLeader() { return listening_.get(); }

  static std::future<absl::StatusOr<std::unique_ptr<Scorer>>> Load(ScorerOptions options) {
    return std::async(std::launch::async,
                      [options = std::move(options)] { return Scorer::Load(options, "first"); });
  }

  // A leader of `first`, which only waits for its members.
  std::future<absl::Status> Assemble(GroupLeaderOptions options) {
    return std::async(std::launch::async, [options = std::move(options), first = First()] {
      return GroupLeader::Assemble(options, first).status();
    });
  }

  // Of processes that serve `first`.
  GroupIdentity First() const {
    return {.fingerprint = FingerprintOf(config_, NumericsMode::kTree),
            .max_context = config_.max_position_embeddings};
  }

  const testing_support::TempDir dir_;
  const ModelConfig config_;
  std::promise<absl::Status> lost_;
  std::promise<int> port_;
  std::shared_future<int> listening_ = port_.get_future().share();
};

// A leader's scorer and its members, from start to end.
class RunningGroup {
 public:
  RunningGroup(int world_size, int local_ranks) : group_(world_size * local_ranks) {}

  ThreadGroup& threads() { return group_; }
  void StartMember(GroupMemberOptions options) {
    members_.push_back(std::make_unique<GroupMember>(std::move(options)));
    ends_.push_back(
        std::async(std::launch::async, [member = members_.back().get()] { return member->Run(); }));
  }
  GroupMember& member(size_t i) { return *members_[i]; }
  absl::Status End(size_t i) { return ends_[i].get(); }
  size_t size() const { return ends_.size(); }

 private:
  ThreadGroup group_;
  std::vector<std::unique_ptr<GroupMember>> members_;
  std::vector<std::future<absl::Status>> ends_;
};

TEST_F(ShardGroupTest, ProcessesGiveTheBitsOfOne) {
  const std::vector<ScoreInput> inputs = RandomInputs(config_, 1, 20, 40);
  ISOBIT_ASSERT_OK_AND_ASSIGN(const auto alone, Scorer::Load(Options(), "first"));
  const AllBits before = ScoreAll(*alone, inputs, FullOptions());
  ISOBIT_ASSERT_OK(alone->UpdateWeights({.model_path = "second"}));
  const AllBits after = ScoreAll(*alone, inputs, FullOptions());
  EXPECT_NE(WithoutVersions(before), WithoutVersions(after));

  for (const auto& [world_size, local_ranks] : std::vector<std::pair<int, int>>{{2, 2}, {3, 1}}) {
    port_ = {};
    listening_ = port_.get_future().share();
    RunningGroup group(world_size, local_ranks);
    auto loading = Load(LeadingOptions(group.threads(), world_size, local_ranks));
    for (int rank = 1; rank < world_size; ++rank) {
      GroupMemberOptions member = MemberOptions(rank, world_size);
      member.local_ranks = local_ranks;
      member.make_backend = [&group, first = rank * local_ranks](const std::string& id) {
        EXPECT_EQ(id, "id");
        return Backend(group.threads(), first);
      };
      group.StartMember(std::move(member));
    }
    {
      ISOBIT_ASSERT_OK_AND_ASSIGN(const auto scorer, loading.get());
      EXPECT_EQ(ScoreAll(*scorer, inputs, FullOptions()), before) << world_size << " processes";
      EXPECT_EQ(ScoreAll(*scorer, {inputs[0]}, FullOptions())[0], before[0]);
      ISOBIT_ASSERT_OK(scorer->UpdateWeights({.model_path = "second"}));
      EXPECT_EQ(ScoreAll(*scorer, inputs, FullOptions()), after) << world_size << " processes";
      EXPECT_THAT(scorer->UpdateWeights({.model_path = "absent"}).status(),
                  StatusIs(absl::StatusCode::kNotFound));
      EXPECT_EQ(ScoreAll(*scorer, inputs, FullOptions()), after);
    }
    for (size_t i = 0; i < group.size(); ++i) ISOBIT_EXPECT_OK(group.End(i));
  }
}

TEST_F(ShardGroupTest, UpdatesWithoutAPassBetweenThem) {
  const std::vector<ScoreInput> inputs = RandomInputs(config_, 1, 4, 20);
  RunningGroup group(2, 1);
  auto loading = Load(LeadingOptions(group.threads(), 2, 1));
  GroupMemberOptions member = MemberOptions(1, 2);
  member.make_backend = [&group](const std::string&) { return Backend(group.threads(), 1); };
  group.StartMember(std::move(member));
  ISOBIT_ASSERT_OK_AND_ASSIGN(auto scorer, loading.get());
  ISOBIT_ASSERT_OK_AND_ASSIGN(const auto alone, Scorer::Load(Options(), "first"));

  ISOBIT_ASSERT_OK(alone->UpdateWeights({.model_path = "second"}));
  ISOBIT_ASSERT_OK(scorer->UpdateWeights({.model_path = "second"}));
  EXPECT_THAT(scorer->UpdateWeights({.model_path = "first", .is_abandoned = [] { return true; }}),
              StatusIs(absl::StatusCode::kCancelled));
  EXPECT_EQ(ScoreAll(*scorer, inputs, FullOptions()), ScoreAll(*alone, inputs, FullOptions()));

  for (Scorer* one : {alone.get(), scorer.get()}) {
    ISOBIT_ASSERT_OK(one->UpdateWeights({.model_path = "second"}));
    ISOBIT_ASSERT_OK(one->UpdateWeights({.model_path = "first"}));
  }
  EXPECT_EQ(ScoreAll(*scorer, inputs, FullOptions()), ScoreAll(*alone, inputs, FullOptions()));
  scorer.reset();
  ISOBIT_EXPECT_OK(group.End(0));
}

TEST_F(ShardGroupTest, ProcessesMustHavePackedTheSameWeights) {
  // A member on a node where the second model is another one, and the third is the leader's first.
  const testing_support::TempDir elsewhere;
  testing_support::WriteTinyModel(config_, 1, elsewhere.File("first"));
  testing_support::WriteTinyModel(config_, 3, elsewhere.File("second"));
  const auto differs = StatusIs(absl::StatusCode::kFailedPrecondition,
                                HasSubstr("rank 1: digest of the weights: the leader has "));
  const auto member_of = [&](RunningGroup& group, const std::string& model) {
    GroupMemberOptions member = MemberOptions(1, 2);
    member.model = model;
    member.scorer.model_root = elsewhere.path();
    member.make_backend = [&group](const std::string&) { return Backend(group.threads(), 1); };
    return member;
  };
  {
    RunningGroup group(2, 1);
    auto loading = Load(LeadingOptions(group.threads(), 2, 1));
    group.StartMember(member_of(group, "second"));
    EXPECT_THAT(loading.get(), differs);
    EXPECT_THAT(group.End(0), differs);
  }
  port_ = {};
  listening_ = port_.get_future().share();
  const std::vector<ScoreInput> inputs = RandomInputs(config_, 1, 4, 20);
  RunningGroup group(2, 1);
  auto loading = Load(LeadingOptions(group.threads(), 2, 1));
  group.StartMember(member_of(group, "first"));
  ISOBIT_ASSERT_OK_AND_ASSIGN(auto scorer, loading.get());
  const AllBits before = ScoreAll(*scorer, inputs, FullOptions());
  EXPECT_THAT(scorer->UpdateWeights({.model_path = "second"}), differs);
  EXPECT_EQ(ScoreAll(*scorer, inputs, FullOptions()), before);
  ISOBIT_ASSERT_OK(scorer->UpdateWeights({.model_path = "first"}));
  EXPECT_EQ(WithoutVersions(ScoreAll(*scorer, inputs, FullOptions())), WithoutVersions(before));
  scorer.reset();
  ISOBIT_EXPECT_OK(group.End(0));
}

// Whose logits are not finite where `kBadToken` is scored.
constexpr int32_t kBadToken = 77;
std::unique_ptr<Ops> MakeBadTokenOps() {
  class BadTokenOps final : public testing_support::ForwardingOps {
   public:
    BadTokenOps() : ForwardingOps(MakeOracleOps()) {}
    absl::Status LogProbs(const LogProbArgs& args) override {
      ISOBIT_RETURN_IF_ERROR(ForwardingOps::LogProbs(args));
      for (int64_t r = 0; r < args.num_rows; ++r) {
        if (args.requests[r].target == kBadToken) args.results[r].finite = false;
      }
      return absl::OkStatus();
    }
  };
  return std::make_unique<BadTokenOps>();
}

TEST_F(ShardGroupTest, AnErrorNamesTheSequenceWhateverProcessScoredIt) {
  RunningGroup group(2, 1);
  ScorerOptions leading = LeadingOptions(group.threads(), 2, 1);
  leading.backend.make_ops = [](int) { return MakeBadTokenOps(); };
  auto loading = Load(std::move(leading));
  GroupMemberOptions member = MemberOptions(1, 2);
  member.make_backend = [&group](const std::string&) {
    RankBackend backend = Backend(group.threads(), 1);
    backend.make_ops = [](int) { return MakeBadTokenOps(); };
    return backend;
  };
  group.StartMember(std::move(member));
  ISOBIT_ASSERT_OK_AND_ASSIGN(auto scorer, loading.get());
  for (size_t bad = 0; bad < 6; ++bad) {
    std::vector<ScoreInput> inputs(6, {.prompt = {1, 2, 3}, .completion = {4, 5, 6}});
    inputs[bad].completion[1] = kBadToken;
    const Submitted job = MakeJob(std::move(inputs));
    ISOBIT_ASSERT_OK(scorer->Submit(job.job));
    EXPECT_THAT(job.collector->WaitUntilDone(),
                StatusIs(absl::StatusCode::kInternal,
                         HasSubstr("sequences[" + std::to_string(bad) + "]: ")));
  }
  scorer.reset();
  ISOBIT_EXPECT_OK(group.End(0));
}

TEST_F(ShardGroupTest, AMemberThatGoesEndsTheGroup) {
  RunningGroup group(2, 1);
  auto loading = Load(LeadingOptions(group.threads(), 2, 1));
  GroupMemberOptions member = MemberOptions(1, 2);
  member.make_backend = [&group](const std::string&) { return Backend(group.threads(), 1); };
  group.StartMember(std::move(member));
  ISOBIT_ASSERT_OK_AND_ASSIGN(const auto scorer, loading.get());

  group.member(0).Cancel();
  EXPECT_FALSE(group.End(0).ok());
  std::future<absl::Status> lost = lost_.get_future();
  ASSERT_EQ(lost.wait_for(kPatience), std::future_status::ready);
  EXPECT_THAT(lost.get(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("rank 1 has gone")));
  const Submitted job = MakeJob(RandomInputs(config_, 1, 5, 20));
  if (scorer->Submit(job.job).ok()) {
    EXPECT_THAT(job.collector->WaitUntilDone(), StatusIs(absl::StatusCode::kUnavailable));
  }
}

TEST_F(ShardGroupTest, ALeaderThatCannotLoadEndsTheGroup) {
  RunningGroup group(2, 1);
  ScorerOptions options = LeadingOptions(group.threads(), 2, 1);
  options.backend.make_ops = [](int) -> absl::StatusOr<std::unique_ptr<Ops>> {
    return absl::ResourceExhaustedError("no memory");
  };
  auto loading = Load(std::move(options));
  GroupMemberOptions member = MemberOptions(1, 2);
  member.make_backend = [&group](const std::string&) { return Backend(group.threads(), 1); };
  group.StartMember(std::move(member));
  EXPECT_THAT(loading.get().status(), StatusIs(absl::StatusCode::kResourceExhausted, "no memory"));
  EXPECT_FALSE(group.End(0).ok());
}

TEST_F(ShardGroupTest, TheLeaderSaysWhyAMemberCannotLoad) {
  RunningGroup group(2, 1);
  auto loading = Load(LeadingOptions(group.threads(), 2, 1));
  GroupMemberOptions member = MemberOptions(1, 2);
  member.make_backend = [](const std::string&) -> absl::StatusOr<RankBackend> {
    return absl::ResourceExhaustedError("no memory");
  };
  group.StartMember(std::move(member));
  EXPECT_THAT(loading.get().status(),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("rank 1: no memory")));
  EXPECT_THAT(group.End(0), StatusIs(absl::StatusCode::kResourceExhausted, "no memory"));
}

TEST_F(ShardGroupTest, AllHearWhyAMembersPassFailed) {
  class Broken final : public testing_support::ForwardingOps {
   public:
    Broken() : ForwardingOps(MakeOracleOps()) {}
    absl::Status LogProbs(const LogProbArgs&) override {
      return absl::InternalError("broken device");
    }
  };
  RunningGroup group(3, 1);
  auto loading = Load(LeadingOptions(group.threads(), 3, 1));
  for (const int rank : {1, 2}) {
    GroupMemberOptions member = MemberOptions(rank, 3);
    member.make_backend = [&group, rank](const std::string&) {
      RankBackend backend = Backend(group.threads(), rank);
      if (rank == 1) backend.make_ops = [](int) { return std::make_unique<Broken>(); };
      return backend;
    };
    group.StartMember(std::move(member));
  }
  ISOBIT_ASSERT_OK_AND_ASSIGN(const auto scorer, loading.get());
  const Submitted submitted = MakeJob(RandomInputs(config_, 1, 20, 40), FullOptions());
  ISOBIT_EXPECT_OK(scorer->Submit(submitted.job));
  const auto why = HasSubstr("rank 1: broken device");
  EXPECT_THAT(submitted.collector->WaitUntilDone(), StatusIs(absl::StatusCode::kUnavailable, why));
  EXPECT_THAT(lost_.get_future().get(), StatusIs(absl::StatusCode::kInternal, why));
  EXPECT_THAT(group.End(0), StatusIs(absl::StatusCode::kInternal, "broken device"));
  EXPECT_THAT(group.End(1), StatusIs(absl::StatusCode::kInternal, why));
}

TEST_F(ShardGroupTest, AMemberDoesNotStayForWeightsThatItLoads) {
  class GatedOps final : public testing_support::ForwardingOps {
   public:
    explicit GatedOps(PassGate& gate)
        : ForwardingOps(MakeOracleOps()),
          packer_(ForwardingOps::packer(), [&gate] { EXPECT_EQ(gate.Pass(), absl::OkStatus()); }) {}
    const WeightPacker& packer() const override { return packer_; }

   private:
    const testing_support::ObservedPacker packer_;
  };
  PassGate gate;
  std::promise<std::shared_ptr<GroupLeader>> assembled;
  std::thread leading(
      [&] { assembled.set_value(*GroupLeader::Assemble(LeaderOptions(2), First())); });
  RunningGroup group(2, 1);
  GroupMemberOptions member = MemberOptions(1, 2);
  member.make_backend = [&](const std::string&) {
    RankBackend backend = Backend(group.threads(), 1);
    backend.make_ops = [&gate](int) { return std::make_unique<GatedOps>(gate); };
    return backend;
  };
  group.StartMember(std::move(member));
  const std::shared_ptr<GroupLeader> leader = assembled.get_future().get();
  leading.join();
  ISOBIT_ASSERT_OK(leader->WaitUntilReady());
  gate.Close();
  const int before = gate.arrivals();
  auto prepared =
      std::async(std::launch::async, [&] { return leader->Prepare("second", 2, "", 1); });
  ASSERT_TRUE(gate.WaitForArrivals(before + 1));
  leader->Abort(absl::InternalError("enough"));
  const auto enough = StatusIs(absl::StatusCode::kInternal, HasSubstr("enough"));
  EXPECT_THAT(prepared.get(), enough);
  EXPECT_THAT(group.End(0), enough);
  gate.Open();
}

TEST_F(ShardGroupTest, AMissingRankIsNamedInTime) {
  std::future<absl::Status> assembled = Assemble(LeaderOptions(4, milliseconds(5000)));
  GroupMember member(MemberOptions(2, 4));
  auto end = std::async(std::launch::async, [&member] { return member.Run(); });
  EXPECT_THAT(assembled.get(), StatusIs(absl::StatusCode::kDeadlineExceeded,
                                        AllOf(HasSubstr("5000 ms"), HasSubstr("rank 1, 3"))));
  EXPECT_FALSE(end.get().ok());
}

TEST_F(ShardGroupTest, WhoDoesNotShowTheGroupSecretGetsNothingButAnAuditLine) {
  GroupLeaderOptions options = LeaderOptions(2);
  options.secret = "secret";
  options.gate = CallGate::Create({.audit = *AuditLog::Open(dir_.File("audit"))});
  auto leading = std::async(std::launch::async, [options, first = First()] {
    return GroupLeader::Assemble(options, first);
  });
  std::string got_id;
  for (const char* secret : {"", "Secret", "secret2", "secret"}) {
    GroupMemberOptions joining = MemberOptions(1, 2);
    joining.secret = secret;
    joining.make_backend = [&](const std::string& nccl_id) -> absl::StatusOr<RankBackend> {
      got_id = nccl_id;
      return absl::InternalError("enough");
    };
    GroupMember member(std::move(joining));
    const absl::Status end = member.Run();
    if (absl::string_view(secret) == "secret") {
      EXPECT_EQ(got_id, "id") << end;
    } else {
      EXPECT_THAT(end, StatusIs(absl::StatusCode::kUnauthenticated, HasSubstr("group_token_file")));
      EXPECT_EQ(got_id, "") << "shown " << secret;
    }
  }
  leading.wait();  // in order or not, by when the member's end reached it

  std::vector<std::string> lines;
  std::ifstream file(dir_.File("audit"));
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  // Of refusals one a second, and that of who joined, with no more than its first message.
  ASSERT_GE(lines.size(), 2u);
  EXPECT_LE(lines.size(), 4u);
  EXPECT_THAT(lines.front(), HasSubstr("UNAUTHENTICATED"));
  EXPECT_THAT(lines.back(), AllOf(HasSubstr("ShardGroupService/Join"), HasSubstr("rank: 1"),
                                  HasSubstr("\"OK\"")));
}

// A certificate of 127.0.0.1 in `directory`, its key, and as the CA whom to trust itself: nobody
// else has signed it.
TlsFiles MakeCertificate(const testing_support::TempDir& directory, const std::string& name) {
  TlsFiles files;
  files.certificate = files.ca = directory.File(name + ".pem");
  files.key = directory.File(name + ".key");
  const std::string command =
      "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj "
      "/CN=" +
      name + " -addext subjectAltName=IP:127.0.0.1 -keyout " + files.key + " -out " +
      files.certificate + " 2>&1";
  EXPECT_EQ(std::system(command.c_str()), 0) << command;
  return files;
}

TEST_F(ShardGroupTest, OverTlsOnlyThoseWithCertificatesOfTheGroupsCaJoin) {
  const TlsFiles ours = MakeCertificate(dir_, "ours");
  const TlsFiles strangers = MakeCertificate(dir_, "strangers");
  // As the scorer's process makes them of its flags.
  ISOBIT_ASSERT_OK_AND_ASSIGN(const ServerSecurity server,
                              MakeServerSecurity({.tls = ours}, "127.0.0.1"));
  GroupLeaderOptions options = LeaderOptions(2);
  options.credentials = server.admin_credentials;
  options.gate = server.gate;
  auto leading = std::async(std::launch::async, [options, first = First()] {
    return GroupLeader::Assemble(options, first);
  });

  std::string got_id;
  const auto join = [&](const TlsFiles& tls, milliseconds timeout) {
    GroupMemberOptions joining = MemberOptions(1, 2);
    joining.timeout = timeout;
    absl::StatusOr<ChannelSecurity> security = MakeChannelSecurity({.tls = tls});
    ISOBIT_EXPECT_OK(security);
    joining.security = *std::move(security);
    joining.make_backend = [&](const std::string& nccl_id) -> absl::StatusOr<RankBackend> {
      got_id = nccl_id;
      return absl::InternalError("enough");
    };
    return GroupMember(std::move(joining)).Run();
  };
  TlsFiles anonymous, mistrusted = ours, mistrusting = ours;
  anonymous.ca = ours.ca;
  mistrusted.certificate = strangers.certificate;
  mistrusted.key = strangers.key;
  mistrusting.ca = strangers.ca;
  const std::pair<const char*, TlsFiles> refused[] = {{"plain text", TlsFiles()},
                                                      {"no certificate", anonymous},
                                                      {"a certificate of another CA", mistrusted},
                                                      {"trusts another CA", mistrusting}};
  const std::string where = "no connection to 127.0.0.1:" + std::to_string(PortOfLeader());
  for (const auto& [what, tls] : refused) {
    EXPECT_THAT(join(tls, milliseconds(1000)),
                StatusIs(absl::StatusCode::kUnavailable, HasSubstr(where)))
        << what;
    EXPECT_EQ(got_id, "") << what;
  }
  EXPECT_THAT(join(ours, kPatience), StatusIs(absl::StatusCode::kInternal, "enough"));
  EXPECT_EQ(got_id, "id");
  leading.wait();  // in order or not, by when the member's end reached it
}

TEST_F(ShardGroupTest, AProcessThatDiffersIsRefusedByName) {
  struct Case {
    const char* what;
    std::function<void(GroupMemberOptions&)> change;
  };
  const std::vector<Case> cases = {
      {"world size: the leader has 2, the member 3",
       [](GroupMemberOptions& member) { member.world_size = 3; }},
      {"shards of a process: the leader has 1, the member 2",
       [](GroupMemberOptions& member) { member.local_ranks = 2; }},
      {"fingerprint of the numerics: the leader has ",
       [](GroupMemberOptions& member) { member.scorer.numerics = NumericsMode::kVanilla; }},
      {"max_context: the leader has ",
       [](GroupMemberOptions& member) { member.scorer.max_context = 17; }},
      {"expected 1 to 1", [](GroupMemberOptions& member) { member.rank = 2; }},
  };
  for (const Case& c : cases) {
    port_ = {};
    listening_ = port_.get_future().share();
    std::future<absl::Status> assembled = Assemble(LeaderOptions(2));
    GroupMemberOptions options = MemberOptions(1, 2);
    c.change(options);
    GroupMember member(std::move(options));
    const auto refused = StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(c.what));
    EXPECT_THAT(member.Run(), refused);
    EXPECT_THAT(assembled.get(), refused);
  }
}

TEST_F(ShardGroupTest, ASecondProcessOfOneRankIsRefused) {
  std::future<absl::Status> assembled = Assemble(LeaderOptions(3, milliseconds(5000)));
  GroupMember first(MemberOptions(1, 3));
  GroupMember second(MemberOptions(1, 3));
  auto first_end = std::async(std::launch::async, [&first] { return first.Run(); });
  auto second_end = std::async(std::launch::async, [&second] { return second.Run(); });
  EXPECT_THAT(assembled.get(),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("come: rank 2")));
  const absl::Status ends[] = {first_end.get(), second_end.get()};
  EXPECT_EQ(absl::IsAlreadyExists(ends[0]) + absl::IsAlreadyExists(ends[1]), 1)
      << ends[0].ToString() << "; " << ends[1].ToString();
}

TEST_F(ShardGroupTest, AMemberMayComeAgainBeforeTheOthersHaveCome) {
  std::future<absl::Status> assembled = Assemble(LeaderOptions(3));
  const auto run = [](GroupMember& member) {
    return std::async(std::launch::async, [&member] { return member.Run(); });
  };
  // Of two, the one that is not refused has come.
  GroupMember first(MemberOptions(1, 3));
  GroupMember second(MemberOptions(1, 3));
  std::future<absl::Status> first_end = run(first);
  std::future<absl::Status> second_end = run(second);
  const auto refused = [](std::future<absl::Status>& end) {
    return end.wait_for(milliseconds(1)) == std::future_status::ready;
  };
  while (!refused(first_end) && !refused(second_end)) {
  }
  (refused(first_end) ? second : first).Cancel();
  EXPECT_FALSE(first_end.get().ok());
  EXPECT_FALSE(second_end.get().ok());

  std::optional<GroupMember> again;
  std::future<absl::Status> again_end;
  do {  // until the leader has seen that the place is free
    again.emplace(MemberOptions(1, 3));
    again_end = run(*again);
  } while (again_end.wait_for(milliseconds(500)) == std::future_status::ready &&
           absl::IsAlreadyExists(again_end.get()));
  GroupMember other(MemberOptions(2, 3));
  std::future<absl::Status> other_end = run(other);
  // All came, whether or not one had failed before the leader looked.
  EXPECT_FALSE(absl::IsDeadlineExceeded(assembled.get()));
  EXPECT_FALSE(again_end.get().ok());
  EXPECT_FALSE(other_end.get().ok());
}

TEST_F(ShardGroupTest, AMessageMayBeLongerThanAClients) {
  std::future<absl::Status> assembled = Assemble(LeaderOptions(2));
  const auto channel = MakeChannel(HostAndPort("127.0.0.1", PortOfLeader()), kMaxGroupMessageBytes);
  const auto stub = v1::ShardGroupService::NewStub(channel);
  grpc::ClientContext context;
  const auto stream = stub->Join(&context);
  v1::MemberMessage message;
  message.mutable_hello()->mutable_identity()->set_version(std::string(kMaxMessageBytes, 'x'));
  EXPECT_TRUE(stream->Write(message));
  // It arrives, and is refused for what it says.
  const auto refused = StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("version: "));
  EXPECT_THAT(FromGrpcStatus(stream->Finish()), refused);
  EXPECT_THAT(assembled.get(), refused);
}

TEST_F(ShardGroupTest, WithoutALeaderAMemberGivesUp) {
  port_.set_value(1);  // nobody listens there
  GroupMemberOptions options = MemberOptions(1, 2);
  options.timeout = milliseconds(500);
  GroupMember member(std::move(options));
  EXPECT_THAT(member.Run(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("127.0.0.1:1")));
}

}  // namespace
}  // namespace isobit
