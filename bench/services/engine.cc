// Steps of an engine over null ranks, alone and behind gRPC with many streams.
#include "bench/services/engine.h"

#include <grpcpp/client_context.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "bench/services/null_engine.h"
#include "common/base/check.h"
#include "common/base/log.h"
#include "common/base/rank_count.h"
#include "common/base/status_macros.h"
#include "common/config/flags.h"
#include "common/rpc/channel.h"
#include "common/rpc/server_runner.h"
#include "isobit/v1/rollout.grpc.pb.h"
#include "rollout/engine/engine.h"
#include "rollout/service/rollout_service.h"

ABSL_FLAG(int, engine_tp, 4, absl::StrCat("engine: rank threads: ", isobit::kRankCounts));
ABSL_FLAG(int, step_us, 1500, "engine: microseconds of a step while gRPC is measured");
ABSL_FLAG(double, engine_seconds, 2.0, "engine: seconds of measurement for each figure");

namespace isobit::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kShortAnswer = 100;  // tokens

double SecondsOf(const timespec& t) {
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

double CpuSeconds(clockid_t clock) {
  timespec now;
  ISOBIT_CHECK(clock_gettime(clock, &now) == 0);
  return SecondsOf(now);
}

double Since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

NullEngineOptions Options(size_t max_running, std::chrono::microseconds step_time = {}) {
  return {.tensor_parallel_size = absl::GetFlag(FLAGS_engine_tp),
          .max_running = max_running,
          .step_time = step_time};
}

struct HostCase {
  size_t running;
  size_t streams;
  int64_t prompt;
  uint32_t max_tokens;
};

// What a step costs the thread that calls Step, including sinks that count tokens.
absl::Status PrintHostCost() {
  std::printf(
      "\nHost work of a step, %d ranks that return at once, in us (median, 99th percentile)\n"
      "%8s %8s %8s %8s %8s %8s %8s\n",
      absl::GetFlag(FLAGS_engine_tp), "running", "streams", "prompt", "answer", "median", "99th",
      "cpu");
  std::vector<HostCase> cases;
  for (const size_t running : {1, 8, 64, 256, 512}) {
    for (const size_t streams : {running, std::max<size_t>(running, 512)}) {
      if (!cases.empty() && cases.back().running == running && streams == running) continue;
      cases.push_back({running, streams, 16, kShortAnswer});
    }
  }
  cases.push_back({64, 64, 16, 100000});
  cases.push_back({64, 64, 30000, 100000});
  for (const HostCase& c : cases) {
    ISOBIT_ASSIGN_OR_RETURN(const auto engine, NullEngine::Create(Options(c.running)));
    Load load(**engine, c.prompt, c.max_tokens);
    load.Fill(c.streams);
    // Until the prefills of the first requests are over.
    while (load.counts.tokens < 4 * c.running) (*engine)->Step();
    std::vector<double> walls;
    double cpu = 0;
    for (const Clock::time_point start = Clock::now();
         Since(start) < absl::GetFlag(FLAGS_engine_seconds);) {
      load.Fill(c.streams);  // not counted: other threads do it
      const double cpu_start = CpuSeconds(CLOCK_THREAD_CPUTIME_ID);
      const Clock::time_point step_start = Clock::now();
      (*engine)->Step();
      walls.push_back(1e6 * Since(step_start));
      cpu += CpuSeconds(CLOCK_THREAD_CPUTIME_ID) - cpu_start;
    }
    std::sort(walls.begin(), walls.end());
    std::printf("%8zu %8zu %8lld %8u %8.1f %8.1f %8.1f\n", c.running, c.streams,
                static_cast<long long>(c.prompt), c.max_tokens, walls[walls.size() / 2],
                walls[walls.size() * 99 / 100], 1e6 * cpu / static_cast<double>(walls.size()));
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

// Reads one stream after the other until it is told to stop.
class Client final : public grpc::ClientReadReactor<v1::GenerateResponse> {
 public:
  Client(v1::RolloutService::Stub& stub, uint32_t max_tokens, Counts& counts) : counts_(counts) {
    for (int i = 0; i < 16; ++i) request_.add_prompt_token_ids(7);
    request_.mutable_sampling()->set_max_tokens(max_tokens);
    request_.mutable_sampling()->set_ignore_eos(true);
    stub.async()->Generate(&context_, &request_, this);
    StartRead(&response_);
    StartCall();
  }
  void OnReadDone(bool ok) override {
    if (!ok) return;
    ++counts_.messages;
    if (!std::exchange(started_, true)) ++counts_.started;
    counts_.tokens += static_cast<uint64_t>(response_.chunk().tokens().token_ids_size());
    StartRead(&response_);
  }
  void OnDone(const grpc::Status&) override { ++counts_.done; }
  void Cancel() { context_.TryCancel(); }

 private:
  Counts& counts_;
  grpc::ClientContext context_;
  v1::GenerateRequest request_;
  v1::GenerateResponse response_;
  bool started_ = false;
};

struct Rate {
  double rows = 0;      // per second, that the ranks compute
  double tokens = 0;    // per second, that the client gets
  double messages = 0;  // per second
  double cores = 0;     // that the whole process uses, client included
};

template <typename Body>
Rate Measure(const NullEngine& engine, const Counts& counts, const Body& body) {
  const double cpu = CpuSeconds(CLOCK_PROCESS_CPUTIME_ID);
  const uint64_t rows = engine.num_rows;
  const uint64_t tokens = counts.tokens;
  const uint64_t messages = counts.messages;
  const Clock::time_point start = Clock::now();
  while (Since(start) < absl::GetFlag(FLAGS_engine_seconds)) body();
  const double seconds = Since(start);
  return {.rows = static_cast<double>(engine.num_rows - rows) / seconds,
          .tokens = static_cast<double>(counts.tokens - tokens) / seconds,
          .messages = static_cast<double>(counts.messages - messages) / seconds,
          .cores = (CpuSeconds(CLOCK_PROCESS_CPUTIME_ID) - cpu) / seconds};
}

void Nap() { std::this_thread::sleep_for(std::chrono::milliseconds(10)); }

absl::StatusOr<Rate> WithoutFront(size_t streams, std::chrono::microseconds step_time) {
  ISOBIT_ASSIGN_OR_RETURN(const auto engine, NullEngine::Create(Options(streams, step_time)));
  Load load(**engine, 16, kNullContext - 16);
  load.Fill(streams);
  (*engine)->Start();
  while (load.counts.tokens < streams) Nap();
  const Rate rate = Measure(*engine, load.counts, Nap);
  (*engine)->Stop();
  return rate;
}

absl::StatusOr<Rate> ThroughFront(size_t streams, std::chrono::microseconds step_time) {
  ISOBIT_ASSIGN_OR_RETURN(const auto engine, NullEngine::Create(Options(streams, step_time)));
  RolloutService service(**engine);
  ServerRunner server(ServerOptions{});
  server.Register(&service, v1::RolloutService::service_full_name());
  ISOBIT_RETURN_IF_ERROR(server.Start());
  (*engine)->Start();
  Counts counts;
  Rate rate;
  {
    const auto stub =
        v1::RolloutService::NewStub(MakeChannel(absl::StrCat("127.0.0.1:", server.port())));
    std::vector<std::unique_ptr<Client>> clients;
    for (size_t i = 0; i < streams; ++i) {
      clients.push_back(
          std::make_unique<Client>(*stub, static_cast<uint32_t>(kNullContext - 16), counts));
    }
    while (counts.started < streams) Nap();
    rate = Measure(*engine, counts, Nap);
    for (const auto& client : clients) client->Cancel();
    while (counts.done < streams) Nap();
  }
  (*engine)->Stop();
  return rate;
}

// What gRPC costs: the rate of tokens with it, over the loopback, and without it.
absl::Status PrintFrontCost() {
  const std::chrono::microseconds step_time(absl::GetFlag(FLAGS_step_us));
  std::printf(
      "\ngRPC with steps of %lld us: tokens/s that the ranks draw, and that the client "
      "gets (a client in this process); %u hardware threads\n"
      "%8s %12s %12s %12s %8s %12s %12s %8s\n",
      static_cast<long long>(step_time.count()), std::thread::hardware_concurrency(), "streams",
      "ideal", "no front", "gRPC", "ratio", "client", "messages/s", "cores");
  for (const size_t streams : {1, 64, 256, 512}) {
    ISOBIT_ASSIGN_OR_RETURN(const Rate without, WithoutFront(streams, step_time));
    ISOBIT_ASSIGN_OR_RETURN(const Rate with, ThroughFront(streams, step_time));
    const double ratio = with.rows / without.rows;
    std::printf("%8zu %12.0f %12.0f %12.0f %7.3f%s %12.0f %12.0f %8.2f\n", streams,
                1e6 * static_cast<double>(streams) / static_cast<double>(step_time.count()),
                without.rows, with.rows, ratio, ratio >= 0.95 ? " " : "!", with.tokens,
                with.messages, with.cores);
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status BenchEngine() {
  ISOBIT_RETURN_IF_ERROR(RequireInRange("engine_tp", absl::GetFlag(FLAGS_engine_tp), 1, 8));
  ISOBIT_RETURN_IF_ERROR(RequireInRange("step_us", absl::GetFlag(FLAGS_step_us), 1, 1000000));
  ISOBIT_RETURN_IF_ERROR(
      RequireInRange("engine_seconds", absl::GetFlag(FLAGS_engine_seconds), 0.01, 60.0));
  ISOBIT_RETURN_IF_ERROR(PrintHostCost());
  return PrintFrontCost();
}

}  // namespace isobit::bench
