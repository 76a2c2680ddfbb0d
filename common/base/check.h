// ISOBIT_CHECK stops the process when an invariant of isobit's own code is broken. Bad input must
// never stop it; that gets an absl::Status.
#ifndef ISOBIT_COMMON_BASE_CHECK_H_
#define ISOBIT_COMMON_BASE_CHECK_H_

#include <sstream>

namespace isobit::internal {

// Collects the message of a failed check; the destructor prints it to stderr and aborts.
class CheckFailure {
 public:
  CheckFailure(const char* file, int line, const char* condition);
  CheckFailure(const CheckFailure&) = delete;
  CheckFailure& operator=(const CheckFailure&) = delete;
  [[noreturn]] ~CheckFailure();

  std::ostream& stream() { return message_; }

 private:
  std::ostringstream message_;
};

// Turns the streamed message into void, so that both arms of the conditional below have one type.
struct Voidify {
  void operator&(std::ostream&) const {}
};

}  // namespace isobit::internal

// NOLINTBEGIN(bugprone-macro-parentheses): the caller's << must bind to the stream inside.
// ISOBIT_CHECK(rows > 0) << "rows " << rows; The condition is evaluated once, in every build type.
#define ISOBIT_CHECK(condition)                 \
  (condition) ? static_cast<void>(0)            \
              : ::isobit::internal::Voidify() & \
                    ::isobit::internal::CheckFailure(__FILE__, __LINE__, #condition).stream()
// NOLINTEND(bugprone-macro-parentheses)

#endif  // ISOBIT_COMMON_BASE_CHECK_H_
