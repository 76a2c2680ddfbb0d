// The table of roles against the services that there are: a new method without a role fails here.
#include "common/access/method_roles.h"

#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "google/protobuf/descriptor.h"
#include "gtest/gtest.h"
#include "isobit/v1/comparator.pb.h"
#include "isobit/v1/rollout.pb.h"
#include "isobit/v1/scorer.pb.h"
#include "isobit/v1/shard_group.pb.h"
#include "vllm/grpc/engine/vllm_engine.pb.h"

namespace isobit {
namespace {

const std::vector<const google::protobuf::FileDescriptor*>& ServiceFiles() {
  static const auto* const files = new std::vector<const google::protobuf::FileDescriptor*>{
      v1::CompareRequest::descriptor()->file(), v1::GenerateRequest::descriptor()->file(),
      v1::ScoreRequest::descriptor()->file(), v1::MemberMessage::descriptor()->file(),
      vllm::grpc::engine::GenerateRequest::descriptor()->file()};
  return *files;
}

// "/package.Service/Method" of every service.
std::vector<std::string> AllMethods() {
  std::vector<std::string> methods;
  for (const google::protobuf::FileDescriptor* file : ServiceFiles()) {
    for (int i = 0; i < file->service_count(); ++i) {
      for (int j = 0; j < file->service(i)->method_count(); ++j) {
        methods.push_back(absl::StrCat("/", file->service(i)->full_name(), "/",
                                       file->service(i)->method(j)->name()));
      }
    }
  }
  return methods;
}

TEST(MethodRolesTest, EveryServiceIsLookedAt) {
  std::set<std::string> known, found;
  for (const google::protobuf::FileDescriptor* file : ServiceFiles()) {
    known.insert(file->name());
  }
  for (const auto& entry : std::filesystem::recursive_directory_iterator(PROTO_DIR)) {
    if (entry.path().extension() != ".proto") continue;
    std::ifstream proto(entry.path());
    for (std::string line; std::getline(proto, line);) {
      if (absl::StartsWith(line, "service ")) {
        found.insert(std::filesystem::relative(entry.path(), PROTO_DIR));
      }
    }
  }
  EXPECT_EQ(known, found);
}

TEST(MethodRolesTest, EveryMethodHasARole) {
  const std::vector<std::string> methods = AllMethods();
  EXPECT_EQ(methods.size(), 37u) << "a method more or less: see docs/API.md's table, too";
  for (const std::string& method : methods) {
    EXPECT_NE(RolesFor(method), RoleSet()) << method << " is in no row of method_roles.cc";
    EXPECT_FALSE(IsOpenToAll(method)) << method;
  }
}

TEST(MethodRolesTest, WhatChangesAServiceIsForAdminsAlone) {
  std::vector<std::string> admin;
  for (const std::string& method : AllMethods()) {
    if (IsAdminMethod(method)) admin.push_back(method);
  }
  EXPECT_EQ(
      admin,
      (std::vector<std::string>{
          "/isobit.v1.ComparatorService/Localise", "/isobit.v1.RolloutService/PauseGeneration",
          "/isobit.v1.RolloutService/ContinueGeneration", "/isobit.v1.RolloutService/Sleep",
          "/isobit.v1.RolloutService/WakeUp", "/isobit.v1.RolloutService/UpdateWeights",
          "/isobit.v1.RolloutService/UpdateWeightsFromStream",
          "/isobit.v1.RolloutService/InitWeightTransfer",
          "/isobit.v1.RolloutService/StartWeightTransfer",
          "/isobit.v1.RolloutService/ReceiveWeights",
          "/isobit.v1.RolloutService/FinishWeightTransfer",
          "/isobit.v1.RolloutService/ShutdownWeightTransfer", "/isobit.v1.RolloutService/Probe",
          "/isobit.v1.ScorerService/UpdateWeights",
          "/isobit.v1.ScorerService/UpdateWeightsFromStream", "/isobit.v1.ScorerService/Probe",
          "/isobit.v1.ShardGroupService/Join"}));
}

TEST(MethodRolesTest, UnknownMethodsHaveNoRoleAndHealthIsOpen) {
  for (const char* method : {"", "/", "/isobit.v1.RolloutService/", "/isobit.v1.RolloutService/X",
                             "isobit.v1.RolloutService/Generate", "/grpc.health.v1.Healthy/Check",
                             "/ISOBIT.V1.RolloutService/Generate"}) {
    EXPECT_EQ(RolesFor(method), RoleSet()) << method;
    EXPECT_FALSE(IsOpenToAll(method)) << method;
  }
  EXPECT_TRUE(IsOpenToAll("/grpc.health.v1.Health/Check"));
}

TEST(MethodRolesTest, NamesOfRoles) {
  for (const CallerRole role : {CallerRole::kGenerate, CallerRole::kScore, CallerRole::kCompare,
                                CallerRole::kWatch, CallerRole::kAdmin}) {
    EXPECT_EQ(RoleOfName(RoleName(role)), role);
  }
  EXPECT_EQ(RoleOfName("root"), std::nullopt);
  EXPECT_EQ(RoleSet(CallerRole::kAdmin, CallerRole::kGenerate).Names(), "generate or admin");
}

}  // namespace
}  // namespace isobit
