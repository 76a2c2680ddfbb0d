// A server binary of ours as a child process, and the health that any server of ours reports.
#ifndef ISOBIT_TESTS_SUPPORT_SERVER_PROCESS_H_
#define ISOBIT_TESTS_SUPPORT_SERVER_PROCESS_H_

#include <grpcpp/channel.h>
#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/support/temp_dir.h"

namespace isobit::testing_support {

// "SERVING", "NOT_SERVING", or the gRPC status code in decimal. `service`: a full proto name, or
// "" for the server as a whole.
std::string Health(grpc::Channel& channel, const std::string& service);

// What a server writes into its port file once it listens; 0: not within ten seconds.
int PortIn(const std::string& port_file);

class ServerProcess {
 public:
  // Starts `binary` with a port of the system's choice. Its output goes to that of the test; its
  // environment is the test's, over which goes `environment`, NAME=value each.
  ServerProcess(const std::string& binary, std::vector<std::string> flags,
                std::vector<std::string> environment = {});
  ~ServerProcess();  // kills it
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  // A channel to it, once it listens. Fails the test if it does not within ten seconds.
  std::shared_ptr<grpc::Channel> Connect();

  void Signal(int signal);

  // Waits for its end: the exit code, or -1 after a death by signal.
  int Join();

 private:
  TempDir dir_;
  pid_t pid_ = 0;
};

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_SUPPORT_SERVER_PROCESS_H_
