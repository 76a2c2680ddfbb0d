// A pipe in the place of stdout, and a thread that empties it.
#include "common/base/stdout_pump.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/descriptor.h"
#include "common/base/line_writer.h"

namespace isobit {
namespace {

constexpr size_t kMaxLineBytes = 4096;
constexpr std::chrono::seconds kLastWait(1);

std::string NoticeOf(uint64_t dropped) {
  return absl::StrCat(dropped, " lines of this output were dropped, as nobody took them\n");
}

// Lives as long as the process.
struct Pump {
  explicit Pump(int real) : lines(*new LineWriter(real, &NoticeOf)) {}

  // Reads `from` to its end, and passes it on by lines.
  void Run(int from) {
    std::string text;
    std::array<char, 4096> piece;
    while (true) {
      const ssize_t size = read(from, piece.data(), piece.size());
      if (size < 0 && errno == EINTR) continue;
      if (size <= 0) break;
      text.append(piece.data(), static_cast<size_t>(size));
      for (size_t end; (end = text.find('\n')) != std::string::npos; text.erase(0, end + 1)) {
        lines.Write(text.substr(0, end + 1));
      }
      if (text.size() >= kMaxLineBytes) lines.Write(std::exchange(text, {}));
    }
    if (!text.empty()) lines.Write(std::move(text));
    ended.set_value();
  }

  LineWriter& lines;
  std::promise<void> ended;
};

Pump* pump = nullptr;

void FinishStdout() {
  std::fflush(stdout);
  // The last descriptor of the pipe's end: the thread reads what is left, and ends.
  const Descriptor nowhere(open("/dev/null", O_WRONLY | O_CLOEXEC));
  if (!nowhere.is_open() || dup2(nowhere.get(), STDOUT_FILENO) < 0) return;
  pump->ended.get_future().wait_for(kLastWait);
  pump->lines.Flush(kLastWait);
}

}  // namespace

void PumpStdout() {
  std::array<int, 2> ends;
  Descriptor real(fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3));
  if (!real.is_open() || pipe2(ends.data(), O_CLOEXEC) != 0) return;
  Descriptor from(ends[0]);
  const Descriptor to(ends[1]);
  pump = new Pump(real.get());
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread([fd = from.get()] { pump->Run(fd); }).detach();
    std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
    dup2(to.get(), STDOUT_FILENO);
    from.Release();
    real.Release();
    std::atexit(&FinishStdout);
  } catch (const std::system_error&) {
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace isobit
