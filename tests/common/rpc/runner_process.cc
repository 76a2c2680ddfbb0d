// A server process for server_runner_test. Generate sends one chunk, then ends after max_tokens
// milliseconds, or never if the request id is "stuck". Flags: those of every service, and
// --fail_after_ms.
#include <chrono>
#include <thread>

#include "absl/flags/flag.h"
#include "common/base/status_macros.h"
#include "common/rpc/server_flags.h"
#include "common/rpc/server_runner.h"
#include "common/rpc/service_main.h"
#include "common/rpc/stream_writer.h"
#include "isobit/v1/rollout.grpc.pb.h"

ABSL_FLAG(int, fail_after_ms, 0, "If positive, fails after that time.");

namespace isobit {
namespace {

class SlowService final : public v1::RolloutService::CallbackService {
 public:
  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(
      grpc::CallbackServerContext* context, const v1::GenerateRequest* request) override {
    auto writer = StreamWriter<v1::GenerateResponse>::Start(context);
    writer->Write(v1::GenerateResponse());
    if (request->request_id() != "stuck") {
      const std::chrono::milliseconds delay(request->sampling().max_tokens());
      std::thread([writer, delay] {
        std::this_thread::sleep_for(delay);
        writer->Finish(absl::OkStatus());
      }).detach();
    }
    return writer.get();
  }
};

absl::StatusOr<int> Serve(const ServerOptions& options) {
  SlowService service;
  ServerRunner runner(options);
  runner.Register(&service, v1::RolloutService::service_full_name());
  ISOBIT_RETURN_IF_ERROR(runner.Start());
  runner.SetServing(true);
  std::thread fault;
  if (const int delay = absl::GetFlag(FLAGS_fail_after_ms); delay > 0) {
    fault = std::thread([&runner, delay] {
      std::this_thread::sleep_for(std::chrono::milliseconds(delay));
      runner.Fail(absl::InternalError("device lost"));
    });
  }
  const int code = runner.Wait();
  if (fault.joinable()) fault.join();
  return code;
}

}  // namespace
}  // namespace isobit

int main(int argc, char** argv) {
  return isobit::ServiceMain(argc, argv, "runner_process: a server for tests",
                             &isobit::ServerOptionsFromFlags, &isobit::Serve);
}
