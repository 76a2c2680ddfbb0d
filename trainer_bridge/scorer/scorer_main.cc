// The scorer process: isobit-scorer. In a group, rank 0 serves and the other processes work for it.
#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "common/base/log.h"
#include "common/base/status_macros.h"
#include "common/http/metrics_page.h"
#include "common/rpc/channel.h"
#include "common/rpc/server_runner.h"
#include "common/rpc/service_main.h"
#include "kernels/runtime/cuda_backend.h"
#include "trainer_bridge/scorer/group_leader.h"
#include "trainer_bridge/scorer/group_member.h"
#include "trainer_bridge/scorer/scorer.h"
#include "trainer_bridge/scorer/scorer_service.h"
#include "trainer_bridge/scorer/scorer_settings.h"

namespace isobit {
namespace {

constexpr char kUsage[] =
    "isobit-scorer: logprobs of given tokens at tensor-parallel size 1, on FSDP-style shards.\n\n"
    "  isobit-scorer --model_root=DIR --model=NAME [--port=N] [--shards=N] [--numerics=MODE]\n"
    "                [--backend=cuda [--devices=0,1,...]] [--world_size=N --rank=I "
    "--master_addr=HOST]";

// Exits without destructors: they would wait for work that a failed device may never end, or for
// weights that nobody needs. All calls have been answered.
[[noreturn]] void ExitAtOnce(int exit_code) {
  FlushLog();
  std::_Exit(exit_code);
}

absl::StatusOr<std::unique_ptr<Scorer>> Load(const ScorerSettings& settings, ServerRunner& runner) {
  ScorerOptions options = settings.scorer;
  options.on_fault = [&runner](const absl::Status& fault) { runner.Fail(fault); };
  std::string nccl_id;
  if (settings.place.world_size > 1) {
    ISOBIT_ASSIGN_OR_RETURN(nccl_id, NewGroupId());
    const GroupLeaderOptions group = {.host = settings.place.master_addr,
                                      .port = settings.place.master_port,
                                      .world_size = settings.place.world_size,
                                      .local_ranks = options.local_shards,
                                      .nccl_id = nccl_id,
                                      .credentials = settings.server.security.admin_credentials,
                                      .secret = settings.group_secret,
                                      .gate = settings.server.security.gate,
                                      .timeout = settings.timeout,
                                      .on_lost = options.on_fault};
    options.assemble = [group](const GroupIdentity& identity) {
      return GroupLeader::Assemble(group, identity);
    };
  }
  ISOBIT_ASSIGN_OR_RETURN(options.backend, MakeScorerBackend(settings, nccl_id));
  return Scorer::Load(std::move(options), settings.model);
}

absl::StatusOr<int> ServeCalls(const ScorerSettings& settings) {
  ScorerService service(settings.service, settings.server.security.gate, settings.server.metrics);
  ServerRunner runner(settings.server);
  runner.Register(&service, v1::ScorerService::service_full_name());
  ISOBIT_ASSIGN_OR_RETURN(const std::unique_ptr<HttpServer> metrics_page,
                          ServeMetrics(settings.server, runner));
  ISOBIT_RETURN_IF_ERROR(runner.Start());
  ISOBIT_LOG(Info) << "loading " << settings.model;
  std::atomic<bool> loaded = false;
  std::thread loading([&] {
    absl::StatusOr<std::unique_ptr<Scorer>> scorer = Load(settings, runner);
    if (!scorer.ok()) {
      ISOBIT_LOG(Error) << "cannot load " << settings.model << ": " << scorer.status().ToString();
      ExitAtOnce(kExitFailed);
    }
    ISOBIT_LOG(Info) << "serving version 1, digest " << (*scorer)->version().digest << ", on "
                     << (*scorer)->options().num_shards << " shards of " << (*scorer)->shard_bytes()
                     << " bytes, " << (*scorer)->ops_name();
    service.SetScorer(*std::move(scorer));
    runner.SetServing(true);
    loaded = true;
  });
  const int exit_code = runner.Wait([&service] { service.BeginDrain(); });
  if (exit_code != kExitStopped || !loaded) ExitAtOnce(exit_code);
  loading.join();
  service.Stop();  // before the runner ends, to which faults are reported
  return exit_code;
}

// Works for the leader. Serves only its health, which is the group's.
absl::StatusOr<int> WorkForLeader(const ScorerSettings& settings) {
  ServerRunner runner(settings.server);
  ISOBIT_ASSIGN_OR_RETURN(const std::unique_ptr<HttpServer> metrics_page,
                          ServeMetrics(settings.server, runner));
  ISOBIT_RETURN_IF_ERROR(runner.Start());
  GroupMember member(
      {.leader = HostAndPort(settings.place.master_addr, settings.place.master_port),
       .rank = settings.place.rank,
       .world_size = settings.place.world_size,
       .local_ranks = settings.scorer.local_shards,
       .timeout = settings.timeout,
       .security = settings.upstream,
       .secret = settings.group_secret,
       .model = settings.model,
       .scorer = settings.scorer,
       .make_backend =
           [&settings](const std::string& nccl_id) { return MakeScorerBackend(settings, nccl_id); },
       .on_ready = [&runner] { runner.SetServing(true); }});
  std::thread work([&] {
    if (const absl::Status end = member.Run(); end.ok()) {
      runner.Stop();
    } else {
      runner.Fail(end);
    }
  });
  // A stop signal may come in the middle of a pass. The leader notices the closed connection.
  ExitAtOnce(runner.Wait());
}

absl::StatusOr<int> Serve(const ScorerSettings& settings) {
  return settings.place.rank > 0 ? WorkForLeader(settings) : ServeCalls(settings);
}

}  // namespace
}  // namespace isobit

int main(int argc, char** argv) {
  return isobit::ServiceMain(argc, argv, isobit::kUsage, &isobit::ScorerSettingsFromFlags,
                             &isobit::Serve);
}
