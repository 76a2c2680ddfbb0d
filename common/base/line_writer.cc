// The queue of lines, the thread that writes them, and the notices of dropped lines.
#include "common/base/line_writer.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <thread>
#include <utility>

#include "common/base/descriptor.h"

namespace isobit {
namespace {

// All signals are left to other threads: one whose write meets no reader gets EPIPE alone.
class WithoutSignals {
 public:
  WithoutSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  WithoutSignals(const WithoutSignals&) = delete;
  WithoutSignals& operator=(const WithoutSignals&) = delete;
  ~WithoutSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

bool IsRegular(int fd) {
  struct stat info = {};
  return fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
}

}  // namespace

LineWriter::LineWriter(int fd, std::function<std::string(uint64_t)> notice)
    : fd_(fd), notice_(std::move(notice)) {}

void LineWriter::Write(std::string line, bool is_urgent) {
  const std::lock_guard lock(mutex_);
  if (queue_.empty() && !is_writing_ && IsRegular(fd_)) return Put(line);
  const size_t bound = kMaxQueuedBytes + (is_urgent ? kReservedBytes : 0);
  if (queued_bytes_ + line.size() <= bound) StartThread();
  if (!has_thread_ || queued_bytes_ + line.size() > bound) {
    ++dropped_;
    return;
  }
  queued_bytes_ += line.size();
  queue_.push_back(std::move(line));
  changed_.notify_all();
}

bool LineWriter::Flush(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, timeout, [this] { return queue_.empty() && !is_writing_; });
}

void LineWriter::StartThread() {
  if (has_thread_) return;
  const WithoutSignals blocked;  // the thread inherits it
  try {
    std::thread([this] { Run(); }).detach();
    has_thread_ = true;
  } catch (const std::system_error&) {  // none to be had: another line tries again
  }
}

void LineWriter::Run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !queue_.empty(); });
    const std::string line = std::move(queue_.front());
    queue_.pop_front();
    queued_bytes_ -= line.size();
    is_writing_ = true;
    lock.unlock();
    Put(line);
    lock.lock();
    if (queue_.empty() && dropped_ > told_) {
      lock.unlock();
      PutNotice();
      lock.lock();
    }
    is_writing_ = false;
    changed_.notify_all();
  }
}

void LineWriter::Put(const std::string& line) {
  PutNotice();
  if (!PutAll(line)) ++dropped_;
}

void LineWriter::PutNotice() {
  const uint64_t dropped = dropped_;
  if (dropped > told_ && PutAll(notice_(dropped - told_))) told_ = dropped;
}

bool LineWriter::PutAll(absl::string_view text) {
  if (is_torn_ && write(fd_, "\n", 1) == 1) is_torn_ = false;
  while (!text.empty()) {
    const ssize_t written = write(fd_, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<size_t>(written));
      is_torn_ = !text.empty();
    } else if (errno == EAGAIN) {  // another process has made what they share non-blocking
      pollfd event = {fd_, POLLOUT, 0};
      poll(&event, 1, -1);
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

void WriteToStderrBounded(absl::string_view text) {
  const WithoutSignals blocked;
  // A description of our own, so that no other process that writes there is made non-blocking. A
  // socket has none; its flag is in each call.
  const Descriptor own(open("/proc/self/fd/2", O_WRONLY | O_APPEND | O_NONBLOCK | O_CLOEXEC));
  const int fd = own.is_open() ? own.get() : STDERR_FILENO;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  while (!text.empty()) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        end - std::chrono::steady_clock::now());
    pollfd event = {fd, POLLOUT, 0};
    if (left.count() <= 0 || poll(&event, 1, static_cast<int>(left.count())) <= 0) return;
    ssize_t written = send(fd, text.data(), text.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (written < 0 && errno == ENOTSOCK) written = write(fd, text.data(), text.size());
    if (written < 0 && errno != EAGAIN && errno != EINTR) return;
    if (written > 0) text.remove_prefix(static_cast<size_t>(written));
  }
}

}  // namespace isobit
