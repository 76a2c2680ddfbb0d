// Formats the lines of ISOBIT_LOG.
#include "common/base/log.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/line_writer.h"
#include "common/base/shorten.h"

namespace isobit {
namespace {

constexpr size_t kMaxLineBytes = 4096;

const char* LevelName(LogLevel level) {
  switch (level) {
    case LogLevel::kInfo:
      return "INFO";
    case LogLevel::kWarning:
      return "WARNING";
    case LogLevel::kError:
      return "ERROR";
  }
  return "UNKNOWN";
}

std::string UtcTime() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  tm utc;
  gmtime_r(&now.tv_sec, &utc);
  return absl::StrFormat("%04d-%02d-%02dT%02d:%02d:%02d.%03dZ", utc.tm_year + 1900, utc.tm_mon + 1,
                         utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec,
                         static_cast<int>(now.tv_nsec / 1000000));
}

const char* BaseName(const char* path) {
  const char* slash = std::strrchr(path, '/');
  return slash == nullptr ? path : slash + 1;
}

std::string Head(LogLevel level, const char* file, int line) {
  return absl::StrCat(UtcTime(), " ", LevelName(level), " ", BaseName(file), ":", line, " ");
}

std::string NoticeOf(uint64_t dropped) {
  return absl::StrCat(Head(LogLevel::kWarning, __FILE__, __LINE__), dropped,
                      " lines of the log were dropped, as nobody took them\n");
}

std::atomic<LineWriter*> log_lines = nullptr;
thread_local bool is_logging = false;

LineWriter* MakeLines() { return new LineWriter(STDERR_FILENO, &NoticeOf); }

// Never destroyed: threads log until the process ends.
LineWriter& Lines() {
  static const bool is_made = [] {
    log_lines = MakeLines();
    // The thread that writes stays with the parent, and so does what waits for it.
    pthread_atfork(nullptr, nullptr, [] { log_lines = MakeLines(); });
    std::atexit([] { FlushLog(); });
    return true;
  }();
  static_cast<void>(is_made);
  return *log_lines;
}

}  // namespace

void FlushLog(std::chrono::milliseconds timeout) {
  if (LineWriter* lines = log_lines; lines != nullptr) lines->Flush(timeout);
}

uint64_t LogLinesDropped() { return Lines().dropped(); }

namespace internal {

void LastWords(absl::string_view text) {
  if (!is_logging) FlushLog();  // a check may fail inside the logger
  WriteToStderrBounded(text);
}

LogMessage::LogMessage(LogLevel level, const char* file, int line) : level_(level) {
  message_ << Head(level, file, line);
}

LogMessage::~LogMessage() {
  // Request fields reach the log. A long one must not fill the disk, and a line break inside one
  // must not forge a second line.
  std::string line = Shorten(std::move(message_).str(), kMaxLineBytes);
  for (char& c : line) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  }
  line += '\n';
  is_logging = true;
  Lines().Write(std::move(line), level_ == LogLevel::kError);
  is_logging = false;
}

}  // namespace internal
}  // namespace isobit
