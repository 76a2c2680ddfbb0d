// How a service that could not start ends. Its other ends: server_runner_test.
#include "common/rpc/service_main.h"

#include <cstdlib>

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace isobit {
namespace {

// Ends as ServiceMain does, but with another exit code if that is in order.
void End(const absl::Status& error) {
  std::atexit([] { std::_Exit(77); });
  std::exit(FailToStart(error));
}

TEST(ServiceMainTest, AnExhaustedProcessEndsAtOnce) {
  EXPECT_EXIT(End(absl::ResourceExhaustedError("no memory")), testing::ExitedWithCode(kExitFailed),
              "cannot start: RESOURCE_EXHAUSTED: no memory");
  EXPECT_EXIT(End(absl::NotFoundError("no model")), testing::ExitedWithCode(77),
              "cannot start: NOT_FOUND: no model");
}

TEST(ServiceMainTest, AServiceThatCannotStartHasFailed) {
  EXPECT_EQ(FailToStart(absl::NotFoundError("no model")), kExitFailed);
}

}  // namespace
}  // namespace isobit
