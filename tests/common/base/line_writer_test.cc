// Lines get there whole, or are dropped and counted; nobody waits for a reader that is slow or
// gone.
#include "common/base/line_writer.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/base/check.h"
#include "common/base/descriptor.h"
#include "common/base/log.h"
#include "common/base/stdout_pump.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temp_dir.h"

namespace isobit {
namespace {

using testing::HasSubstr;

constexpr std::chrono::milliseconds kLong = std::chrono::minutes(2);
const std::string kLine = std::string(999, 'x') + "\n";

// Lives as long as the process, as its thread does.
LineWriter& WriterTo(int fd) {
  static auto& all = *new std::vector<LineWriter*>;
  all.push_back(
      new LineWriter(fd, [](uint64_t dropped) { return absl::StrCat("dropped ", dropped, "\n"); }));
  return *all.back();
}

struct Pipe {
  Pipe() {
    std::array<int, 2> ends;
    EXPECT_EQ(pipe2(ends.data(), O_CLOEXEC), 0);
    from = Descriptor(ends[0]);
    to = ends[1];
  }
  // What is there until `count` lines are.
  std::vector<std::string> Lines(size_t count) {
    std::array<char, 4096> piece;
    while (num_lines < count) {
      const ssize_t size = read(from.get(), piece.data(), piece.size());
      if (size <= 0) break;
      num_lines += static_cast<size_t>(std::count(piece.begin(), piece.begin() + size, '\n'));
      text.append(piece.data(), static_cast<size_t>(size));
    }
    std::vector<std::string> lines = absl::StrSplit(text, '\n');
    lines.pop_back();  // what follows the last end of line
    return lines;
  }

  Descriptor from;
  int to = -1;  // stays open
  std::string text;
  size_t num_lines = 0;  // in `text`
};

TEST(LineWriterTest, ARegularFileHasEachLineAtOnce) {
  const testing_support::TempDir dir;
  const std::string path = dir.File("log");
  LineWriter& writer = WriterTo(open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  for (int i = 0; i < 3; ++i) {
    writer.Write(absl::StrCat(i, "\n"));
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    EXPECT_EQ(text.str().size(), 2u * static_cast<size_t>(i + 1));
  }
  EXPECT_EQ(writer.dropped(), 0u);
}

TEST(LineWriterTest, AReaderGetsEveryLine) {
  Pipe pipe;
  LineWriter& writer = WriterTo(pipe.to);
  std::thread reader([&] { EXPECT_EQ(pipe.Lines(5000).size(), 5000u); });
  for (int i = 0; i < 5000; ++i) {
    writer.Write(kLine);
    if (i % 500 == 499) {
      EXPECT_TRUE(writer.Flush(kLong));
    }
  }
  reader.join();
  EXPECT_EQ(writer.dropped(), 0u);
}

// INVARIANT: no writer waits for a reader.
TEST(LineWriterTest, WhatNobodyReadsIsDroppedAndTold) {
  Pipe pipe;
  LineWriter& writer = WriterTo(pipe.to);
  constexpr size_t kCount = 3000;  // more than the pipe and the queue hold
  for (size_t i = 0; i < kCount; ++i) writer.Write(kLine);
  EXPECT_FALSE(writer.Flush(std::chrono::milliseconds(1)));
  const uint64_t dropped = writer.dropped();
  EXPECT_GT(dropped, 1000u);
  writer.Write("why it ended\n", /*is_urgent=*/true);
  EXPECT_EQ(writer.dropped(), dropped) << "there is room left for what is urgent";
  std::vector<std::string> lines = pipe.Lines(kCount - dropped + 2);
  // A slow thread tells it in parts.
  const auto told = [&] {
    uint64_t sum = 0;
    for (const std::string& line : lines) {
      uint64_t count = 0;
      if (absl::StartsWith(line, "dropped ") && absl::SimpleAtoi(line.substr(8), &count))
        sum += count;
    }
    return sum;
  };
  while (told() < dropped || std::count(lines.begin(), lines.end(), "why it ended") == 0) {
    const size_t had = lines.size();
    lines = pipe.Lines(had + 1);
    ASSERT_GT(lines.size(), had);
  }
  EXPECT_EQ(told(), dropped);
  EXPECT_EQ(std::count(lines.begin(), lines.end(), kLine.substr(0, 999)),
            static_cast<int64_t>(kCount - dropped));
  EXPECT_EQ(std::count(lines.begin(), lines.end(), "why it ended"), 1);
  EXPECT_TRUE(writer.Flush(kLong));
}

// INVARIANT: a reader that goes away ends no process, and one that comes back learns what it
// missed.
TEST(LineWriterTest, AReaderThatIsGoneEndsNothing) {
  const testing_support::TempDir dir;
  const std::string path = dir.File("fifo");
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  signal(SIGPIPE, SIG_DFL);
  Descriptor reader(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  LineWriter& writer = WriterTo(open(path.c_str(), O_WRONLY | O_CLOEXEC));
  reader.Close();
  for (int i = 0; i < 3; ++i) writer.Write("lost\n");
  EXPECT_TRUE(writer.Flush(kLong));
  EXPECT_EQ(writer.dropped(), 3u);
  Pipe pipe;
  pipe.from = Descriptor(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  writer.Write("seen\n");
  EXPECT_TRUE(writer.Flush(kLong));
  EXPECT_THAT(pipe.Lines(2), testing::ElementsAre("dropped 3", "seen"));
}

TEST(LineWriterTest, AnotherProcessMayHaveMadeItNonBlocking) {
  Pipe pipe;
  fcntl(pipe.to, F_SETFL, O_NONBLOCK);
  LineWriter& writer = WriterTo(pipe.to);
  for (int i = 0; i < 200; ++i) writer.Write(kLine);
  EXPECT_EQ(pipe.Lines(200).size(), 200u);
  EXPECT_EQ(writer.dropped(), 0u);
}

// What happens in a process with that output; its exit status.
int StatusOf(int output, void (*act)(), int fd = STDERR_FILENO) {
  const pid_t child = fork();
  if (child == 0) {
    dup2(output, fd);
    alarm(60);  // a wait for ever ends, otherwise than expected
    act();
    std::exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

void LogMuch() {
  for (int i = 0; i < 1000; ++i) ISOBIT_LOG(Info) << kLine.substr(0, 900);
}

// INVARIANT: a process whose stderr is a full pipe ends as it would otherwise.
TEST(LogToAFullPipeTest, NothingHoldsUpTheEnd) {
  Pipe pipe;
  EXPECT_EQ(StatusOf(pipe.to, &LogMuch), 0);
  const int aborted = StatusOf(pipe.to, [] {
    LogMuch();
    ISOBIT_CHECK(false) << "on purpose";
  });
  EXPECT_TRUE(WIFSIGNALED(aborted) && WTERMSIG(aborted) == SIGABRT) << aborted;
}

TEST(LogToAPipeTest, TheLastLinesComeOut) {
  Pipe pipe;
  const int aborted = StatusOf(pipe.to, [] {
    ISOBIT_LOG(Info) << "before";
    ISOBIT_CHECK(false) << "on purpose";
  });
  EXPECT_TRUE(WIFSIGNALED(aborted));
  EXPECT_EQ(StatusOf(pipe.to, [] { ISOBIT_LOG(Error) << "cannot start"; }), 0);
  const std::vector<std::string> lines = pipe.Lines(3);
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_THAT(lines[0], HasSubstr("before"));
  EXPECT_THAT(lines[1], HasSubstr("check failed: false on purpose"));
  EXPECT_THAT(lines[2], HasSubstr("cannot start"));
}

TEST(StdoutPumpTest, NoPrintWaitsForAReader) {
  Pipe pipe;
  const auto print_much = [] {
    signal(SIGPIPE, SIG_DFL);
    PumpStdout();
    for (int i = 0; i < 3000; ++i) std::printf("%s", kLine.c_str());
  };
  EXPECT_EQ(StatusOf(pipe.to, print_much, STDOUT_FILENO), 0);
  pipe.from.Close();
  EXPECT_EQ(StatusOf(pipe.to, print_much, STDOUT_FILENO), 0);
}

TEST(StdoutPumpTest, WhatWasPrintedComesOut) {
  Pipe pipe;
  const auto print_some = [] {
    PumpStdout();
    for (int i = 0; i < 30; ++i) std::printf("%s", kLine.c_str());
    std::printf("no end of line");
  };
  EXPECT_EQ(StatusOf(pipe.to, print_some, STDOUT_FILENO), 0);
  close(pipe.to);
  pipe.Lines(1000);  // to the end
  EXPECT_EQ(pipe.text.size(), 30 * kLine.size() + 14);
}

}  // namespace
}  // namespace isobit
