// The gate in a real server, over plain loopback connections: roles, quotas, the admin port, audit
// lines and hidden paths. tests/attack/ tests TLS.
#include "common/access/call_gate.h"

#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/server_builder.h>

#include <fstream>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/access/method_roles.h"
#include "common/base/digest.h"
#include "common/rpc/server_credentials.h"
#include "gtest/gtest.h"
#include "isobit/v1/rollout.grpc.pb.h"
#include "nlohmann/json.hpp"
#include "proto/isobit/status_convert.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_dir.h"

namespace isobit {
namespace {

using testing::HasSubstr;
using testing_support::StatusIs;
using testing_support::TempDir;
constexpr auto kDenied = absl::StatusCode::kPermissionDenied;
constexpr auto kUnauthenticated = absl::StatusCode::kUnauthenticated;

// Unary methods only: enough to see which calls are let through.
class FakeRollout final : public v1::RolloutService::CallbackService {
 public:
  explicit FakeRollout(CallGate& gate) : gate_(gate) {}

  grpc::ServerUnaryReactor* GetLoad(grpc::CallbackServerContext* context, const v1::GetLoadRequest*,
                                    v1::GetLoadResponse*) override {
    last_client = gate_.ClientOf(*context);
    return Answer(context, gate_.Admit(*context, {.requests = 1, .tokens = tokens}));
  }
  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* context,
                                  const v1::AbortRequest* request, v1::AbortResponse*) override {
    return Answer(context, request->all() ? gate_.CheckAdmin(*context)
                                          : absl::InternalError("cannot read /srv/models/x: gone"));
  }
  grpc::ServerUnaryReactor* UpdateWeights(grpc::CallbackServerContext* context,
                                          const v1::UpdateWeightsRequest*,
                                          v1::UpdateWeightsResponse*) override {
    return Answer(context, absl::NotFoundError("/srv/models/x: no such\ndirectory"));
  }

  int64_t tokens = 0;
  std::string last_client;

 private:
  static grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context,
                                          const absl::Status& status) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(ToGrpcStatus(status, *context));
    return reactor;
  }
  CallGate& gate_;
};

class CallGateTest : public testing::Test {
 protected:
  // One client for each role, whose token is the role's name.
  std::shared_ptr<AccessFile> WriteAccess() {
    std::string clients;
    for (const char* role : {"generate", "score", "compare", "watch", "admin"}) {
      absl::StrAppend(&clients, clients.empty() ? "" : ",", "{\"name\": \"the-", role,
                      "\", \"roles\": [\"", role, "\"], \"token_sha256\": [\"",
                      Sha256Hex(role, std::char_traits<char>::length(role)), "\"]}");
    }
    return *AccessFile::Open(dir_.Write("access.json", "{\"clients\": [" + clients + "]}"));
  }

  void Start(CallGateOptions options) {
    options.audit = *AuditLog::Open(dir_.File("audit"));
    gate_ = CallGate::Create(std::move(options));
    service_ = std::make_unique<FakeRollout>(*gate_);
    server_ = StartServer(Listener::kMain, &port_);
    admin_server_ = StartServer(Listener::kAdmin, &admin_port_);
  }

  std::unique_ptr<grpc::Server> StartServer(Listener listener, int* port) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0",
                             gate_->checks_calls() ? LoopbackCredentials(gate_->CheckFor(listener))
                                                   : grpc::InsecureServerCredentials(),
                             port);
    builder.RegisterService(service_.get());
    std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> factories;
    factories.push_back(gate_->InterceptorFor(listener));
    builder.experimental().SetInterceptorCreators(std::move(factories));
    std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
    EXPECT_NE(server, nullptr);
    return server;
  }

  // Calls with the header authorization, unless it is empty.
  template <class Call>
  absl::Status At(int port, const std::string& authorization, const Call& call) {
    const auto channel =
        grpc::CreateChannel(absl::StrCat("127.0.0.1:", port), grpc::InsecureChannelCredentials());
    const auto stub = v1::RolloutService::NewStub(channel);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
    if (!authorization.empty()) context.AddMetadata("authorization", authorization);
    return FromGrpcStatus(call(*stub, context), context);
  }
  absl::Status Load(const std::string& authorization) { return At(port_, authorization, GetLoad); }

  static grpc::Status GetLoad(v1::RolloutService::Stub& stub, grpc::ClientContext& context) {
    v1::GetLoadResponse response;
    return stub.GetLoad(&context, {}, &response);
  }
  static grpc::Status Update(v1::RolloutService::Stub& stub, grpc::ClientContext& context) {
    v1::UpdateWeightsRequest request;
    request.set_model_path(std::string(100000, 'x') + "\n\"");
    v1::UpdateWeightsResponse response;
    return stub.UpdateWeights(&context, request, &response);
  }
  static grpc::Status Abort(v1::RolloutService::Stub& stub, grpc::ClientContext& context) {
    v1::AbortResponse response;
    return stub.Abort(&context, {}, &response);
  }
  static grpc::Status AbortAll(v1::RolloutService::Stub& stub, grpc::ClientContext& context) {
    v1::AbortRequest request;
    request.set_all(true);
    v1::AbortResponse response;
    return stub.Abort(&context, request, &response);
  }

  std::vector<nlohmann::json> AuditLines() {
    std::ifstream file(dir_.File("audit"));
    std::vector<nlohmann::json> lines;
    for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
    return lines;
  }

  const TempDir dir_;
  std::shared_ptr<CallGate> gate_;
  std::unique_ptr<FakeRollout> service_;
  std::unique_ptr<grpc::Server> server_, admin_server_;
  int port_ = 0, admin_port_ = 0;
};

TEST_F(CallGateTest, WithoutAnAccessFileEverybodyMayDoEverything) {
  Start({});
  ISOBIT_EXPECT_OK(Load(""));
  EXPECT_EQ(service_->last_client, "ipv4:127.0.0.1");
  ISOBIT_EXPECT_OK(At(port_, "", AbortAll));
  EXPECT_THAT(At(port_, "", Update), StatusIs(absl::StatusCode::kNotFound, HasSubstr("/srv/")));
}

TEST_F(CallGateTest, TokensAreWhatOpensTheDoor) {
  Start({.access = WriteAccess()});
  for (const char* wrong : {"", "watch", "Bearer ", "Bearer Watch", "Bearer watch2", "Basic watch",
                            "Bearerwatch", "Bearer  watch"}) {
    EXPECT_THAT(Load(wrong), StatusIs(kUnauthenticated)) << wrong;
  }
  ISOBIT_EXPECT_OK(Load("Bearer watch"));
  EXPECT_EQ(service_->last_client, "the-watch");
  ISOBIT_EXPECT_OK(Load("bearer admin"));
  EXPECT_EQ(service_->last_client, "the-admin");
}

TEST_F(CallGateTest, ARoleThatLacksIsNamed) {
  Start({.access = WriteAccess()});
  const absl::Status denied = Load("Bearer score");
  EXPECT_THAT(denied,
              StatusIs(kDenied, HasSubstr("client \"the-score\" lacks the role watch or "
                                          "admin, which /isobit.v1.RolloutService/GetLoad")));
  EXPECT_THAT(At(port_, "Bearer watch", Update), StatusIs(kDenied, HasSubstr("the role admin")));
  EXPECT_THAT(At(port_, "Bearer admin", Update), StatusIs(absl::StatusCode::kNotFound));
}

TEST_F(CallGateTest, WhoeverGeneratesMayNotAbortAll) {
  Start({.access = WriteAccess()});
  EXPECT_THAT(At(port_, "Bearer generate", AbortAll), StatusIs(kDenied, HasSubstr("admin")));
  EXPECT_THAT(At(port_, "Bearer score", AbortAll), StatusIs(kDenied));
  ISOBIT_EXPECT_OK(At(port_, "Bearer admin", AbortAll));
}

TEST_F(CallGateTest, ATokenTakenOutOfTheFileEndsAtOnceOnAnOpenConnection) {
  Start({.access = WriteAccess()});
  ISOBIT_EXPECT_OK(Load("Bearer watch"));
  dir_.Write("access.json", R"({"clients": []})");
  EXPECT_THAT(Load("Bearer watch"), StatusIs(kUnauthenticated));
}

TEST_F(CallGateTest, PathsAreForThoseWhoMayLook) {
  Start({.access = WriteAccess()});
  EXPECT_THAT(At(port_, "Bearer generate", Abort),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("cannot read (path): gone")));
  EXPECT_THAT(At(port_, "Bearer admin", Abort),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("/srv/models/x")));
}

TEST_F(CallGateTest, AdminMethodsAreAtTheAdminPortAlone) {
  Start({.has_admin_port = true});
  EXPECT_THAT(At(port_, "", Update), StatusIs(kDenied, HasSubstr("at the admin port")));
  EXPECT_THAT(At(admin_port_, "", Update), StatusIs(absl::StatusCode::kNotFound));
  EXPECT_THAT(At(port_, "", AbortAll), StatusIs(kDenied, HasSubstr("at the admin port")));
  ISOBIT_EXPECT_OK(At(admin_port_, "", AbortAll));
  ISOBIT_EXPECT_OK(At(port_, "", GetLoad));
  ISOBIT_EXPECT_OK(At(admin_port_, "", GetLoad));
}

TEST_F(CallGateTest, TheAdminPortAsksForTheRoleToo) {
  Start({.access = WriteAccess(), .has_admin_port = true});
  EXPECT_THAT(At(admin_port_, "", Update), StatusIs(kUnauthenticated));
  EXPECT_THAT(At(admin_port_, "Bearer watch", Update), StatusIs(kDenied));
  EXPECT_THAT(At(admin_port_, "Bearer admin", Update), StatusIs(absl::StatusCode::kNotFound));
  EXPECT_THAT(At(port_, "Bearer admin", Update), StatusIs(kDenied, HasSubstr("admin port")));
  EXPECT_THAT(At(port_, "Bearer admin", AbortAll), StatusIs(kDenied, HasSubstr("admin port")));
}

TEST_F(CallGateTest, TwoTokensAreNone) {
  Start({.access = WriteAccess()});
  const auto twice = [](auto& stub, grpc::ClientContext& context) {
    context.AddMetadata("authorization", "Bearer watch");
    return GetLoad(stub, context);
  };
  EXPECT_THAT(At(port_, "Bearer watch", twice), StatusIs(kUnauthenticated));
  EXPECT_THAT(At(port_, "Bearer score", twice), StatusIs(kUnauthenticated));
}

TEST_F(CallGateTest, PlainTextProvesNoCertificate) {
  // gRPC names every caller on loopback "local".
  Start({.access = *AccessFile::Open(
             dir_.Write("local.json", R"({"clients": [{"name": "x", "roles": ["watch"],
                                            "certificates": ["local"]}]})"))});
  EXPECT_THAT(Load(""), StatusIs(kUnauthenticated, HasSubstr("expected a bearer token")));
}

TEST_F(CallGateTest, ACallGivesItsQuotaBackAtItsEnd) {
  Start({.quota = Quota::Create({.requests = 1, .tokens = 10}, {.requests = 8, .tokens = 80})});
  for (int i = 0; i < 5; ++i) ISOBIT_EXPECT_OK(Load(""));
  service_->tokens = 11;
  EXPECT_THAT(Load(""), StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("11 tokens")));
}

TEST_F(CallGateTest, AdminCallsLeaveOneLineEachWhateverTheirArguments) {
  Start({.access = WriteAccess()});
  ISOBIT_EXPECT_OK(Load("Bearer watch"));
  EXPECT_FALSE(At(port_, "Bearer admin", Update).ok());
  ISOBIT_EXPECT_OK(At(port_, "Bearer admin", AbortAll));
  EXPECT_FALSE(At(port_, "Bearer watch", Update).ok());
  EXPECT_FALSE(At(port_, "", Update).ok());  // left out: within a second of the last refusal
  EXPECT_FALSE(At(port_, "Bearer generate", AbortAll).ok());  // likewise
  EXPECT_FALSE(At(port_, "Bearer generate", Abort).ok());     // of its own requests: no line
  EXPECT_FALSE(At(port_, "Bearer admin", Abort).ok());        // of anybody's
  server_->Shutdown();
  server_->Wait();

  const auto lines = AuditLines();
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_EQ(lines[0]["client"], "the-admin");
  EXPECT_EQ(lines[0]["method"], "/isobit.v1.RolloutService/UpdateWeights");
  EXPECT_EQ(lines[0]["outcome"], "NOT_FOUND");
  EXPECT_THAT(lines[0]["peer"].get<std::string>(), testing::StartsWith("ipv4:127.0.0.1:"));
  EXPECT_THAT(lines[0]["arguments"].get<std::string>(), HasSubstr("model_path: \"xxx"));
  EXPECT_LT(lines[0].dump().size(), 2000u);
  EXPECT_EQ(lines[1]["outcome"], "OK");
  EXPECT_EQ(lines[1]["arguments"], "all: true");
  EXPECT_EQ(lines[2]["client"], "the-watch");
  EXPECT_EQ(lines[2]["outcome"], "PERMISSION_DENIED");
  EXPECT_EQ(lines[3]["client"], "the-admin");
  EXPECT_EQ(lines[3]["method"], "/isobit.v1.RolloutService/Abort");
}

TEST(WithoutPathsTest, TakesPathsOutAndNothingElse) {
  const std::pair<const char*, const char*> cases[] = {
      {"", ""},
      {"cannot read /srv/models/a b", "cannot read (path) b"},
      {"\"/srv/x\": gone", "\"(path)\": gone"},
      {"path=/srv/x, then", "path=(path), then"},
      {"/srv/x", "(path)"},
      {"4096/8192 tokens/s, 3 / 4 /", "4096/8192 tokens/s, 3 / 4 /"},
      {"models/x is relative", "models/x is relative"},
      {"a:/b", "a:(path)"},
  };
  for (const auto& [text, expected] : cases) EXPECT_EQ(WithoutPaths(text), expected);
}

}  // namespace
}  // namespace isobit
