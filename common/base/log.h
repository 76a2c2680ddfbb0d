// ISOBIT_LOG(Info|Warning|Error) << ...: one line to stderr with UTC time, level and source line,
// of some 4 KiB at most. Safe from any thread.
#ifndef ISOBIT_COMMON_BASE_LOG_H_
#define ISOBIT_COMMON_BASE_LOG_H_

#include <sstream>

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
  std::ostringstream message_;
};

}  // namespace internal
}  // namespace isobit

#define ISOBIT_LOG(level) \
  ::isobit::internal::LogMessage(::isobit::LogLevel::k##level, __FILE__, __LINE__).stream()

#endif  // ISOBIT_COMMON_BASE_LOG_H_
