// ISOBIT_LOG(Info|Warning|Error) << ...: writes one line to stderr with UTC time, level and source
// line, at most about 4 KiB. Safe from any thread; never waits for the reader (line_writer.h). A
// process that returns from main or calls exit waits up to a second for its last lines.
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

// Writes `text`, which ends with a newline, to stderr, after the lines logged before; takes at most
// two seconds. For processes that abort. Allocates nothing.
void LastWords(absl::string_view text);

}  // namespace internal

// Waits until the log is written; gives up after `timeout`. For processes that end by _Exit.
void FlushLog(std::chrono::milliseconds timeout = std::chrono::seconds(1));

// The number of log lines that could not be written.
uint64_t LogLinesDropped();

}  // namespace isobit

#define ISOBIT_LOG(level) \
  ::isobit::internal::LogMessage(::isobit::LogLevel::k##level, __FILE__, __LINE__).stream()

#endif  // ISOBIT_COMMON_BASE_LOG_H_
