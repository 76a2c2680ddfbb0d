// One message is one line, whatever it contains and whoever else is logging.
#include "common/base/log.h"

#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace isobit {
namespace {

TEST(LogTest, LineHasTimeLevelAndPlace) {
  testing::internal::CaptureStderr();
  ISOBIT_LOG(Warning) << "queue " << 7;
  const std::string line = testing::internal::GetCapturedStderr();
  EXPECT_THAT(line,
              testing::MatchesRegex("[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}[.][0-9]{3}Z WARNING "
                                    "log_test[.]cc:[0-9]+ queue 7\n"));
}

TEST(LogTest, LineBreaksInsideAMessageCannotForgeALine) {
  testing::internal::CaptureStderr();
  ISOBIT_LOG(Info) << "id=a\nERROR forged";
  const std::string line = testing::internal::GetCapturedStderr();
  EXPECT_EQ(line.find('\n'), line.size() - 1) << line;
}

TEST(LogTest, ALineIsBoundedWhateverAClientSends) {
  testing::internal::CaptureStderr();
  ISOBIT_LOG(Info) << "loading " << std::string(15 << 20, 'x');
  const std::string line = testing::internal::GetCapturedStderr();
  EXPECT_LT(line.size(), 5000u);
  EXPECT_THAT(line, testing::HasSubstr("loading xxx"));
  EXPECT_THAT(line, testing::HasSubstr("xxx... (157286"));
}

TEST(LogTest, ThreadsDoNotInterleave) {
  constexpr int kThreads = 4;
  constexpr int kLines = 200;
  testing::internal::CaptureStderr();
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < kLines; ++i) ISOBIT_LOG(Error) << std::string(100, 'a' + t);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::istringstream lines(testing::internal::GetCapturedStderr());
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    ASSERT_THAT(line, testing::MatchesRegex("[^ ]+ ERROR log_test[.]cc:[0-9]+ "
                                            "(a{100}|b{100}|c{100}|d{100})"));
  }
  EXPECT_EQ(count, kThreads * kLines);
}

}  // namespace
}  // namespace isobit
