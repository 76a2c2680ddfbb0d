// The terminate handler that names what ran out, and the trial start of threads.
#include "common/base/exhaustion.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <future>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"

namespace isobit {
namespace {

// Allocates nothing: there may be no memory.
[[noreturn]] void ExitWith(const char* what, const char* detail) {
  std::array<char, 512> line;
  const int size = std::snprintf(line.data(), line.size(), "ERROR %s: %s\n", what, detail);
  internal::LastWords({line.data(), std::min(static_cast<size_t>(size), line.size() - 1)});
  std::_Exit(EXIT_FAILURE);
}

std::terminate_handler abort_as_before = &std::abort;

[[noreturn]] void OnTerminate() {
  try {
    if (std::current_exception() != nullptr) std::rethrow_exception(std::current_exception());
  } catch (const std::bad_alloc&) {
    ExitWith("out of memory", "the process may have no more (ulimit -v, a container's limit)");
  } catch (const std::system_error& error) {
    ExitWith("cannot start a thread (ulimit -u, a container's limit of processes or memory)",
             error.what());
  } catch (...) {
  }
  abort_as_before();
  std::abort();
}

}  // namespace

void ExitWhenExhausted() {
  const std::terminate_handler before = std::set_terminate(&OnTerminate);
  if (before != &OnTerminate) abort_as_before = before;
}

absl::Status CheckThreadsCanStart(int count) {
  std::promise<void> end;
  const std::shared_future<void> ended = end.get_future().share();
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(count));
  absl::Status status;
  try {
    while (static_cast<int>(threads.size()) < count)
      threads.emplace_back([ended] { ended.wait(); });
  } catch (const std::system_error& error) {
    status = absl::ResourceExhaustedError(
        absl::StrCat("cannot start ", count, " threads, only ", threads.size(),
                     " (ulimit -u and -v, a container's limits): ", error.what()));
  }
  end.set_value();
  for (std::thread& thread : threads) thread.join();
  return status;
}

}  // namespace isobit
