// ISOBIT_LOG(Info|Warning|Error) << ...: one line to stderr with UTC time, level and source line,
// of some 4 KiB at most. Safe from any thread, and never waits for whoever reads it
// (line_writer.h); a process that returns from main or calls exit gives the last lines a second.
#ifndef ISOBIT_COMMON_BASE_LOG_H_
#define ISOBIT_COMMON_BASE_LOG_H_

#include <chrono>
#include <cstdint>
#include <sstream>

#include "absl/strings/string_view.h"

namespace isobit {

enum class LogLevel { kInfo, kWarning, kError };

namespace internal {

// Collects one message; the destructor writes it as a single line.
class LogMessage {
 public:
  LogMessage(LogLevel level, const char* file, int line);
  LogMessage(const LogMessage&) = delete;
  LogMessage& operator=(const LogMessage&) = delete;
  ~LogMessage();

  std::ostream& stream() { return message_; }

 private:
  const LogLevel level_;
  std::ostringstream message_;
};

// Writes `text`, which ends with a line's end, to stderr behind what has been logged, within two
// seconds at most: for processes that abort. Allocates nothing.
void LastWords(absl::string_view text);

}  // namespace internal

// Waits until the log is written; gives up after `timeout`. For processes that end by _Exit.
void FlushLog(std::chrono::milliseconds timeout = std::chrono::seconds(1));

// Lines of the log that could not be written.
uint64_t LogLinesDropped();

}  // namespace isobit

#define ISOBIT_LOG(level) \
  ::isobit::internal::LogMessage(::isobit::LogLevel::k##level, __FILE__, __LINE__).stream()

#endif  // ISOBIT_COMMON_BASE_LOG_H_
