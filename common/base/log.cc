// Formats and writes the lines of ISOBIT_LOG.
#include "common/base/log.h"

#include <cstdio>
#include <cstring>
#include <ctime>
#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/shorten.h"

namespace isobit::internal {
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

}  // namespace

LogMessage::LogMessage(LogLevel level, const char* file, int line) {
  message_ << UtcTime() << " " << LevelName(level) << " " << BaseName(file) << ":" << line << " ";
}

LogMessage::~LogMessage() {
  // Request fields reach the log. A long one must not fill the disk, and a line break inside one
  // must not forge a second line.
  std::string line = Shorten(std::move(message_).str(), kMaxLineBytes);
  for (char& c : line) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
  }
  line += '\n';
  std::fwrite(line.data(), 1, line.size(), stderr);  // one call holds the stream's lock once
}

}  // namespace isobit::internal
