// Spawns servers and asks for their health. See server_process.h.
#include "tests/support/server_process.h"

#include <grpcpp/client_context.h>
#include <grpcpp/impl/codegen/client_unary_call.h>
#include <grpcpp/support/byte_buffer.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <thread>

#include "common/rpc/channel.h"
#include "gtest/gtest.h"

extern char** environ;

namespace isobit::testing_support {

// The messages are so small that this writes their bytes instead of using their proto file.
std::string Health(grpc::Channel& channel, const std::string& service) {
  std::string request(1, '\x0a');
  request.push_back(static_cast<char>(service.size()));
  request.append(service);
  const grpc::Slice slice(request);
  const grpc::ByteBuffer request_buffer(&slice, 1);
  grpc::ByteBuffer response_buffer;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  const grpc::internal::RpcMethod method("/grpc.health.v1.Health/Check",
                                         grpc::internal::RpcMethod::NORMAL_RPC);
  const grpc::Status status = grpc::internal::BlockingUnaryCall<grpc::ByteBuffer, grpc::ByteBuffer>(
      &channel, method, &context, request_buffer, &response_buffer);
  if (!status.ok()) return std::to_string(status.error_code());
  grpc::Slice response;
  EXPECT_TRUE(response_buffer.DumpToSingleSlice(&response).ok());
  const std::string bytes(reinterpret_cast<const char*>(response.begin()), response.size());
  return bytes == "\x08\x01" ? "SERVING" : bytes == "\x08\x02" ? "NOT_SERVING" : "UNKNOWN";
}

int PortIn(const std::string& port_file) {
  int port = 0;
  for (int i = 0; i < 1000 && !(std::ifstream(port_file) >> port); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return port;
}

ServerProcess::ServerProcess(const std::string& binary, std::vector<std::string> flags,
                             std::vector<std::string> environment) {
  flags.insert(flags.begin(), {binary, "--port=0", "--port_file=" + dir_.File("port")});
  std::vector<char*> arguments;
  for (std::string& flag : flags) arguments.push_back(flag.data());
  arguments.push_back(nullptr);
  std::vector<char*> variables;
  for (std::string& variable : environment) variables.push_back(variable.data());
  for (char** variable = environ; *variable != nullptr; ++variable) variables.push_back(*variable);
  variables.push_back(nullptr);
  EXPECT_EQ(
      posix_spawn(&pid_, binary.c_str(), nullptr, nullptr, arguments.data(), variables.data()), 0);
}

ServerProcess::~ServerProcess() {
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

std::shared_ptr<grpc::Channel> ServerProcess::Connect() {
  const int port = PortIn(dir_.File("port"));
  EXPECT_GT(port, 0);
  return MakeChannel("127.0.0.1:" + std::to_string(port));
}

void ServerProcess::Signal(int signal) { EXPECT_EQ(kill(pid_, signal), 0); }

int ServerProcess::Join() {
  int status = 0;
  EXPECT_EQ(waitpid(pid_, &status, 0), pid_);
  pid_ = 0;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace isobit::testing_support
