// Exit codes mean the same for all three services (docs/operations.md).
#include "common/base/exit_code.h"

#include <signal.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/support/server_process.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_name.h"
#include "tests/support/tiny_model.h"

namespace isobit {
namespace {

using testing_support::PortIn;
using testing_support::ServerProcess;

struct Service {
  const char* name;
  const char* binary;
  bool has_model;
};

class ExitCodeTest : public testing::TestWithParam<Service> {
 protected:
  ExitCodeTest() {
    testing_support::WriteTinyModel(testing_support::TinyConfig(Architecture::kLlama), 1,
                                    root_.File("tiny"));
  }

  std::vector<std::string> Flags(std::vector<std::string> more) const {
    if (GetParam().has_model) {
      more.insert(more.begin(), {"--model_root=" + root_.path(), "--model=tiny"});
    }
    return more;
  }
  int Run(const std::vector<std::string>& flags) const {
    return ServerProcess(GetParam().binary, Flags(flags)).Join();
  }

  const testing_support::TempDir root_;
};

INSTANTIATE_TEST_SUITE_P(Services, ExitCodeTest,
                         testing::Values(Service{"Rollout", ROLLOUT_BINARY, true},
                                         Service{"Scorer", SCORER_BINARY, true},
                                         Service{"Comparator", COMPARATOR_BINARY, false}),
                         [](const auto& info) { return info.param.name; });

TEST_P(ExitCodeTest, StoppedAsAsked) {
  ServerProcess process(GetParam().binary, Flags({}));
  ASSERT_NE(process.Connect(), nullptr);
  process.Signal(SIGTERM);
  EXPECT_EQ(process.Join(), kExitStopped);
  EXPECT_EQ(Run({"--help"}), kExitStopped);
}

TEST_P(ExitCodeTest, BadUsage) {
  for (const char* flag :
       {"--no_such_flag", "unexpected", "--port=65536", "--port=x", "--admin_port=-1",
        "--drain_timeout_ms=-1", "--max_client_share=0", "--max_client_tokens=0", "--tls_cert=x",
        "--host=0.0.0.0", "--access_file=/nowhere", "--port_file=/"}) {
    EXPECT_EQ(Run({flag}), kExitBadUsage) << flag;
  }
}

TEST_P(ExitCodeTest, CouldNotStart) {
  ServerProcess first(GetParam().binary, Flags({"--port_file=" + root_.File("port")}));
  const int taken = PortIn(root_.File("port"));
  ASSERT_GT(taken, 0);
  EXPECT_EQ(Run({absl::StrCat("--port=", taken)}), kExitFailed);
  EXPECT_EQ(Run({"--host=192.0.2.1", "--insecure"}), kExitFailed) << "not an address of this host";
  if (!GetParam().has_model) return;
  // What is asked for is there to ask for, but not with this model.
  for (const char* flag : {"--model=absent", "--model=../tiny", "--max_context=513"}) {
    EXPECT_EQ(Run({flag}), kExitFailed) << flag;
  }
#ifdef HAS_NO_CUDA
  EXPECT_EQ(Run({"--backend=cuda"}), kExitFailed);
#endif
}

}  // namespace
}  // namespace isobit
