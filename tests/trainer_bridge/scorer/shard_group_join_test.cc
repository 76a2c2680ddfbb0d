// Who may join a shard group, whose processes are threads here, and what the others are told.
#include <cstdlib>
#include <fstream>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/base/digest.h"
#include "common/rpc/channel.h"
#include "common/rpc/channel_security.h"
#include "common/rpc/server_security.h"
#include "gtest/gtest.h"
#include "proto/isobit/status_convert.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"
#include "tests/support/tiny_model.h"
#include "tests/trainer_bridge/scorer/shard_group_fixture.h"
#include "trainer_bridge/scorer/group_messages.h"

namespace isobit {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::HasSubstr;
using testing_support::StatusIs;

using ShardGroupJoinTest = ShardGroupFixture;

TEST_F(ShardGroupJoinTest, AMissingRankIsNamedInTime) {
  std::future<absl::Status> assembled = Assemble(LeaderOptions(4, milliseconds(5000)));
  GroupMember member(MemberOptions(2, 4));
  auto end = std::async(std::launch::async, [&member] { return member.Run(); });
  EXPECT_THAT(assembled.get(), StatusIs(absl::StatusCode::kDeadlineExceeded,
                                        AllOf(HasSubstr("5000 ms"), HasSubstr("rank 1, 3"))));
  EXPECT_FALSE(end.get().ok());
}

TEST_F(ShardGroupJoinTest, WhoDoesNotShowTheGroupSecretGetsNothingButAnAuditLine) {
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
  // At most one refusal a second is audited, and the member that joined, with its first message.
  ASSERT_GE(lines.size(), 2u);
  EXPECT_LE(lines.size(), 4u);
  EXPECT_THAT(lines.front(), HasSubstr("UNAUTHENTICATED"));
  EXPECT_THAT(lines.back(), AllOf(HasSubstr("ShardGroupService/Join"), HasSubstr("rank: 1"),
                                  HasSubstr("\"OK\"")));
}

TEST_F(ShardGroupJoinTest, AMemberThatLeavesTheAccessFileIsLost) {
  const std::string hash = Sha256Hex("token", 5);
  const std::string access = dir_.Write(
      "access.json", R"({"clients": [{"name": "member", "roles": ["admin"], "token_sha256": [")" +
                         hash + R"("]}]})");
  ISOBIT_ASSERT_OK_AND_ASSIGN(
      const ServerSecurity server,
      MakeServerSecurity({.access_file = access, .audit_log = dir_.File("audit")}, "127.0.0.1"));
  GroupLeaderOptions options = LeaderOptions(2);
  options.credentials = server.admin_credentials;
  options.gate = server.gate;
  std::promise<absl::Status> lost;
  options.on_lost = [&lost](const absl::Status& status) { lost.set_value(status); };
  auto leading = std::async(std::launch::async, [options, first = First()] {
    return GroupLeader::Assemble(options, first);
  });
  GroupMemberOptions joining = MemberOptions(1, 2);
  ISOBIT_ASSERT_OK_AND_ASSIGN(joining.security,
                              MakeChannelSecurity({.token_file = dir_.Write("token", "token")}));
  std::promise<void> joined, enough;
  joining.make_backend = [&](const std::string&) -> absl::StatusOr<RankBackend> {
    joined.set_value();
    enough.get_future().wait();
    return absl::InternalError("enough");
  };
  GroupMember member(std::move(joining));
  auto end = std::async(std::launch::async, [&member] { return member.Run(); });
  ISOBIT_ASSERT_OK_AND_ASSIGN(std::shared_ptr<GroupLeader> leader, leading.get());
  joined.get_future().wait();
  dir_.Write("access.json", R"({"clients": []})");
  std::future<absl::Status> why = lost.get_future();
  ASSERT_EQ(why.wait_for(kPatience), std::future_status::ready);
  EXPECT_THAT(why.get(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("rank 1 has gone")));
  enough.set_value();
  EXPECT_FALSE(end.get().ok());
  leader.reset();  // whose calls have ended then

  std::vector<std::string> lines;
  std::ifstream file(dir_.File("audit"));
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_THAT(lines.front(), HasSubstr("\"OK\""));
  EXPECT_THAT(lines.back(),
              AllOf(HasSubstr("ShardGroupService/Join"), HasSubstr("UNAUTHENTICATED")));
}

// A self-signed certificate of 127.0.0.1 in `directory`, and its key. It is also the CA to trust.
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

TEST_F(ShardGroupJoinTest, OverTlsOnlyThoseWithCertificatesOfTheGroupsCaJoin) {
  const TlsFiles ours = MakeCertificate(dir_, "ours");
  const TlsFiles strangers = MakeCertificate(dir_, "strangers");
  // As the scorer's process makes it from its flags.
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

TEST_F(ShardGroupJoinTest, AProcessThatDiffersIsRefusedByName) {
  ModelConfig other = config_;
  other.eos_token_ids = {1, 3};
  testing_support::WriteTinyModel(other, 1, dir_.File("other"));
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
      {"prefix_sharing: the leader has 1, the member 0",
       [](GroupMemberOptions& member) { member.scorer.prefix_sharing = false; }},
      {"model settings: the leader has eos_token_ids=1 max_position_embeddings=",
       [](GroupMemberOptions& member) { member.model = "other"; }},
      {"expected 1 to 1", [](GroupMemberOptions& member) { member.rank = 2; }},
  };
  for (const Case& c : cases) {
    ForgetLeader();
    std::future<absl::Status> assembled = Assemble(LeaderOptions(2));
    GroupMemberOptions options = MemberOptions(1, 2);
    c.change(options);
    GroupMember member(std::move(options));
    const auto refused = StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(c.what));
    EXPECT_THAT(member.Run(), refused);
    EXPECT_THAT(assembled.get(), refused);
  }
}

TEST_F(ShardGroupJoinTest, ASecondProcessOfOneRankIsRefused) {
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

TEST_F(ShardGroupJoinTest, AMemberMayComeAgainBeforeTheOthersHaveCome) {
  std::future<absl::Status> assembled = Assemble(LeaderOptions(3));
  const auto run = [](GroupMember& member) {
    return std::async(std::launch::async, [&member] { return member.Run(); });
  };
  // One of these two is refused; the other one has joined.
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
  do {  // until the leader has noticed that the rank is free
    again.emplace(MemberOptions(1, 3));
    again_end = run(*again);
  } while (again_end.wait_for(milliseconds(500)) == std::future_status::ready &&
           absl::IsAlreadyExists(again_end.get()));
  GroupMember other(MemberOptions(2, 3));
  std::future<absl::Status> other_end = run(other);
  // All have joined, even if one failed before the leader looked.
  EXPECT_FALSE(absl::IsDeadlineExceeded(assembled.get()));
  EXPECT_FALSE(again_end.get().ok());
  EXPECT_FALSE(other_end.get().ok());
}

TEST_F(ShardGroupJoinTest, AMessageMayBeLongerThanAClients) {
  std::future<absl::Status> assembled = Assemble(LeaderOptions(2));
  const auto channel = MakeChannel(HostAndPort("127.0.0.1", PortOfLeader()), kMaxGroupMessageBytes);
  const auto stub = v1::ShardGroupService::NewStub(channel);
  grpc::ClientContext context;
  const auto stream = stub->Join(&context);
  v1::MemberMessage message;
  message.mutable_hello()->mutable_identity()->set_version(std::string(kMaxMessageBytes, 'x'));
  EXPECT_TRUE(stream->Write(message));
  // The long message arrives, and is refused for its content.
  const auto refused = StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("version: "));
  EXPECT_THAT(FromGrpcStatus(stream->Finish()), refused);
  EXPECT_THAT(assembled.get(), refused);
}

TEST_F(ShardGroupJoinTest, WithoutALeaderAMemberGivesUp) {
  port_.set_value(1);  // nobody listens there
  GroupMemberOptions options = MemberOptions(1, 2);
  options.timeout = milliseconds(500);
  GroupMember member(std::move(options));
  EXPECT_THAT(member.Run(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("127.0.0.1:1")));
}

}  // namespace
}  // namespace isobit
