// Runs one of our servers as a child process, and asks a server for its health.
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
  // Starts `binary` on a free port. Its output goes to the test's. Its environment is the test's
  // with the changes of `environment`, each NAME=value.
  ServerProcess(const std::string& binary, std::vector<std::string> flags,
                std::vector<std::string> environment = {});
  ~ServerProcess();  // kills it
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  // A channel to the server, once it listens. Fails the test if it does not within ten seconds.
  std::shared_ptr<grpc::Channel> Connect();

  void Signal(int signal);

  // Waits for its end. Returns the exit code, or -1 if a signal killed it.
  int Join();

 private:
  TempDir dir_;
  pid_t pid_ = 0;
};

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_SUPPORT_SERVER_PROCESS_H_
