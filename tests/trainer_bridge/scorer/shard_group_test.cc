// A scorer of several processes, which are threads here: what they compute together, and how the
// group ends. shard_group_join_test.cc has who may join.
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/status_macros.h"
#include "gtest/gtest.h"
#include "kernels/model/model_plan.h"
#include "kernels/oracle/oracle_backend.h"
#include "tests/support/forwarding_backend.h"
#include "tests/support/observed_packer.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_model.h"
#include "tests/trainer_bridge/scorer/pass_gate.h"
#include "tests/trainer_bridge/scorer/scoring_fixture.h"
#include "tests/trainer_bridge/scorer/shard_group_fixture.h"

namespace isobit {
namespace {

using testing::HasSubstr;
using testing_support::StatusIs;

using ShardGroupTest = ShardGroupFixture;

TEST_F(ShardGroupTest, ProcessesGiveTheBitsOfOne) {
  std::vector<ScoreInput> inputs = RandomInputs(config_, 1, 20, 40);
  for (ScoreInput& input : AlikeInputs(config_, 2)) inputs.push_back(std::move(input));
  ScorerOptions options = Options();
  options.prefix_sharing = false;
  ISOBIT_ASSERT_OK_AND_ASSIGN(const auto alone, Scorer::Load(options, "first"));
  const AllBits before = ScoreAll(*alone, inputs, FullOptions());
  ISOBIT_ASSERT_OK(alone->UpdateWeights({.model_path = "second"}));
  const AllBits after = ScoreAll(*alone, inputs, FullOptions());
  EXPECT_NE(WithoutVersions(before), WithoutVersions(after));
  const std::vector<int32_t> probed = {3, 14, 15, 9, 2, 6, 5};
  const ProbeWanted wanted = {.site = ProbeSite{1, ProbeOp::kAttention}, .row = 4};
  const ProbeReport report = alone->Probe(probed, wanted)->report;
  EXPECT_FALSE(report.values.empty());

  for (const auto& [world_size, local_ranks] : std::vector<std::pair<int, int>>{{2, 2}, {3, 1}}) {
    ForgetLeader();
    RunningGroup group(world_size, local_ranks);
    options = LeadingOptions(group.threads(), world_size, local_ranks);
    options.max_batch_tokens = 512;
    auto loading = Load(options);
    for (int rank = 1; rank < world_size; ++rank) {
      GroupMemberOptions member = MemberOptions(rank, world_size);
      member.local_ranks = local_ranks;
      member.scorer.max_batch_tokens = 512;
      member.make_backend = [&group, first = rank * local_ranks](const std::string& id) {
        EXPECT_EQ(id, "id");
        return BackendOf(group.threads(), first);
      };
      group.StartMember(std::move(member));
    }
    {
      ISOBIT_ASSERT_OK_AND_ASSIGN(const auto scorer, loading.get());
      EXPECT_EQ(ScoreAll(*scorer, inputs, FullOptions()), before) << world_size << " processes";
      EXPECT_EQ(ScoreAll(*scorer, {inputs[0]}, FullOptions())[0], before[0]);
      ISOBIT_ASSERT_OK(scorer->UpdateWeights({.model_path = "second"}));
      EXPECT_GT(scorer->work().shared_tokens, 0);
      EXPECT_EQ(ScoreAll(*scorer, inputs, FullOptions()), after) << world_size << " processes";
      EXPECT_EQ(scorer->Probe(probed, wanted)->report, report) << world_size << " processes";
      EXPECT_NE(scorer->Probe({probed.data(), 6}, wanted)->report, report) << "control";
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
  member.make_backend = [&group](const std::string&) { return BackendOf(group.threads(), 1); };
  group.StartMember(std::move(member));
  ISOBIT_ASSERT_OK_AND_ASSIGN(auto scorer, loading.get());
  ISOBIT_ASSERT_OK_AND_ASSIGN(const auto alone, Scorer::Load(Options(), "first"));

  ISOBIT_ASSERT_OK(alone->UpdateWeights({.model_path = "second"}));
  ISOBIT_ASSERT_OK(scorer->UpdateWeights({.model_path = "second"}));
  EXPECT_THAT(scorer->UpdateWeights({.model_path = "first", .is_abandoned = [] { return true; }}),
              StatusIs(absl::StatusCode::kCancelled));
  EXPECT_EQ(ScoreAll(*scorer, inputs, FullOptions()), ScoreAll(*alone, inputs, FullOptions()));

  std::vector<Tensor> listed;
  for (const ExpectedTensor& spec : ExpectedTensors(ModelPlan(config_))) {
    listed.push_back({.name = spec.name, .dtype = DType::kBf16, .shape = spec.shape});
  }
  ISOBIT_ASSERT_OK_AND_ASSIGN(const auto stream,
                              StreamedSource::Create(listed, ModelPlan(config_), {}, {}));
  EXPECT_THAT(scorer->UpdateWeights({.stream = stream}),
              StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("directory")));

  for (Scorer* one : {alone.get(), scorer.get()}) {
    ISOBIT_ASSERT_OK(one->UpdateWeights({.model_path = "second"}));
    ISOBIT_ASSERT_OK(one->UpdateWeights({.model_path = "first"}));
  }
  EXPECT_EQ(ScoreAll(*scorer, inputs, FullOptions()), ScoreAll(*alone, inputs, FullOptions()));
  scorer.reset();
  ISOBIT_EXPECT_OK(group.End(0));
}

TEST_F(ShardGroupTest, ProcessesMustHavePackedTheSameWeights) {
  // A member on another node, whose `first` has the leader's weights and whose `second` has others.
  const testing_support::TempDir elsewhere;
  testing_support::WriteTinyModel(config_, 1, elsewhere.File("first"));
  testing_support::WriteTinyModel(config_, 3, elsewhere.File("second"));
  const auto differs = StatusIs(absl::StatusCode::kFailedPrecondition,
                                HasSubstr("rank 1: digest of the weights: the leader has "));
  const auto member_of = [&](RunningGroup& group, const std::string& model) {
    GroupMemberOptions member = MemberOptions(1, 2);
    member.model = model;
    member.scorer.model_root = elsewhere.path();
    member.make_backend = [&group](const std::string&) { return BackendOf(group.threads(), 1); };
    return member;
  };
  {
    RunningGroup group(2, 1);
    auto loading = Load(LeadingOptions(group.threads(), 2, 1));
    group.StartMember(member_of(group, "second"));
    EXPECT_THAT(loading.get(), differs);
    EXPECT_THAT(group.End(0), differs);
  }
  ForgetLeader();
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

// Ops whose logits are not finite where `kBadToken` is scored.
constexpr int32_t kBadToken = 77;
std::unique_ptr<Backend> MakeBadTokenOps() {
  class BadTokenOps final : public testing_support::ForwardingBackend {
   public:
    BadTokenOps() : ForwardingBackend(MakeOracleBackend()) { Replace<LogProbsArgs>(*this); }
    absl::Status On(const LogProbsArgs& args) {
      ISOBIT_RETURN_IF_ERROR(inner().Run(args));
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
    RankBackend backend = BackendOf(group.threads(), 1);
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
  member.make_backend = [&group](const std::string&) { return BackendOf(group.threads(), 1); };
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
  options.backend.make_ops = [](int) -> absl::StatusOr<std::unique_ptr<Backend>> {
    return absl::ResourceExhaustedError("no memory");
  };
  auto loading = Load(std::move(options));
  GroupMemberOptions member = MemberOptions(1, 2);
  member.make_backend = [&group](const std::string&) { return BackendOf(group.threads(), 1); };
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
  class Broken final : public testing_support::ForwardingBackend {
   public:
    Broken() : ForwardingBackend(MakeOracleBackend()) { Replace<LogProbsArgs>(*this); }
    absl::Status On(const LogProbsArgs&) { return absl::InternalError("broken device"); }
  };
  RunningGroup group(3, 1);
  auto loading = Load(LeadingOptions(group.threads(), 3, 1));
  for (const int rank : {1, 2}) {
    GroupMemberOptions member = MemberOptions(rank, 3);
    member.make_backend = [&group, rank](const std::string&) {
      RankBackend backend = BackendOf(group.threads(), rank);
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
  class GatedOps final : public testing_support::ForwardingBackend {
   public:
    explicit GatedOps(PassGate& gate)
        : ForwardingBackend(MakeOracleBackend()), packer_(ForwardingBackend::packer(), [&gate] {
            EXPECT_EQ(gate.Pass(), absl::OkStatus());
          }) {}
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
    RankBackend backend = BackendOf(group.threads(), 1);
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

}  // namespace
}  // namespace isobit
