// The table of methods and the roles that may call them.
#include "common/access/method_roles.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_join.h"

namespace isobit {
namespace {

constexpr std::array<const char*, 5> kRoleNames = {"generate", "score", "compare", "watch",
                                                   "admin"};

struct Row {
  absl::string_view method;
  RoleSet roles;
};

constexpr RoleSet kAdmin(CallerRole::kAdmin);
constexpr RoleSet kLook(CallerRole::kWatch, CallerRole::kAdmin);
constexpr RoleSet kRouter(CallerRole::kGenerate, CallerRole::kWatch, CallerRole::kAdmin);

// INVARIANT: every method of every service of ours has a row (MethodRolesTest.EveryMethodHasARole).
constexpr Row kRows[] = {
    {"/isobit.v1.RolloutService/Generate", RoleSet(CallerRole::kGenerate)},
    // For a client's own requests. Those of others, or all requests, need admin
    // (RolloutService::Abort).
    {"/isobit.v1.RolloutService/Abort", RoleSet(CallerRole::kGenerate, CallerRole::kAdmin)},
    {"/isobit.v1.RolloutService/PauseGeneration", kAdmin},
    {"/isobit.v1.RolloutService/ContinueGeneration", kAdmin},
    {"/isobit.v1.RolloutService/Sleep", kAdmin},
    {"/isobit.v1.RolloutService/WakeUp", kAdmin},
    {"/isobit.v1.RolloutService/Probe", kAdmin},
    {"/isobit.v1.RolloutService/UpdateWeights", kAdmin},
    {"/isobit.v1.RolloutService/UpdateWeightsFromStream", kAdmin},
    {"/isobit.v1.RolloutService/InitWeightTransfer", kAdmin},
    {"/isobit.v1.RolloutService/StartWeightTransfer", kAdmin},
    {"/isobit.v1.RolloutService/ReceiveWeights", kAdmin},
    {"/isobit.v1.RolloutService/FinishWeightTransfer", kAdmin},
    {"/isobit.v1.RolloutService/ShutdownWeightTransfer", kAdmin},
    // It shows what all clients have asked and got.
    {"/isobit.v1.RolloutService/Tap", RoleSet(CallerRole::kCompare)},
    {"/isobit.v1.RolloutService/GetServerInfo", kLook},
    {"/isobit.v1.RolloutService/GetLoad", kLook},
    // As the calls of RolloutService that they stand for.
    {"/vllm.grpc.engine.VllmEngine/Generate", RoleSet(CallerRole::kGenerate)},
    {"/vllm.grpc.engine.VllmEngine/Abort", RoleSet(CallerRole::kGenerate, CallerRole::kAdmin)},
    {"/vllm.grpc.engine.VllmEngine/GetModelInfo", kLook},
    {"/vllm.grpc.engine.VllmEngine/GetServerInfo", kLook},
    {"/vllm.grpc.engine.VllmEngine/GetLoads", kLook},
    {"/vllm.grpc.engine.VllmEngine/HealthCheck", kRouter},
    // Not served, which they say.
    {"/vllm.grpc.engine.VllmEngine/Embed", kRouter},
    {"/vllm.grpc.engine.VllmEngine/GetTokenizer", kRouter},
    {"/vllm.grpc.engine.VllmEngine/SubscribeKvEvents", kRouter},
    {"/isobit.v1.ScorerService/Score", RoleSet(CallerRole::kScore)},
    {"/isobit.v1.ScorerService/Probe", kAdmin},
    {"/isobit.v1.ScorerService/UpdateWeights", kAdmin},
    {"/isobit.v1.ScorerService/UpdateWeightsFromStream", kAdmin},
    {"/isobit.v1.ScorerService/GetServerInfo", kLook},
    {"/isobit.v1.ComparatorService/Compare", RoleSet(CallerRole::kCompare)},
    {"/isobit.v1.ComparatorService/Record", RoleSet(CallerRole::kCompare)},
    {"/isobit.v1.ComparatorService/Watch", kLook},
    {"/isobit.v1.ComparatorService/Localise", kAdmin},
    {"/isobit.v1.ComparatorService/GetServerInfo", kLook},
    {"/isobit.v1.ShardGroupService/Join", kAdmin},
    // Paths of HTTP (common/http).
    {"/metrics", kLook},
    {"/events", kLook},
    {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", kLook},
};

}  // namespace

const char* RoleName(CallerRole role) { return kRoleNames[static_cast<size_t>(role)]; }

std::optional<CallerRole> RoleOfName(absl::string_view name) {
  const auto found = std::find(kRoleNames.begin(), kRoleNames.end(), name);
  if (found == kRoleNames.end()) return std::nullopt;
  return static_cast<CallerRole>(found - kRoleNames.begin());
}

std::string RoleSet::Names() const {
  std::vector<const char*> names;
  for (size_t i = 0; i < kRoleNames.size(); ++i) {
    if (Has(static_cast<CallerRole>(i))) names.push_back(kRoleNames[i]);
  }
  return absl::StrJoin(names, " or ");
}

RoleSet RolesFor(absl::string_view method) {
  const auto* const row = std::find_if(std::begin(kRows), std::end(kRows),
                                       [&](const Row& r) { return r.method == method; });
  return row == std::end(kRows) ? RoleSet() : row->roles;
}

bool IsOpenToAll(absl::string_view method) {
  return absl::StartsWith(method, "/grpc.health.v1.Health/");
}

bool IsAdminMethod(absl::string_view method) { return RolesFor(method) == kAdmin; }

}  // namespace isobit
