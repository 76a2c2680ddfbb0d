// Writes lines to a descriptor (stderr, stdout) whose reader may be slow, stopped or gone, so that
// no caller waits for the reader or is killed by SIGPIPE. Not here: a line's content, audit files.
#ifndef ISOBIT_COMMON_BASE_LINE_WRITER_H_
#define ISOBIT_COMMON_BASE_LINE_WRITER_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>

#include "absl/strings/string_view.h"

namespace isobit {

// Thread-safe. A regular file gets each line at once. For anything else, callers put lines into a
// queue, and the writer's own thread writes them. Lines that find the queue full or cannot be
// written any more are dropped and counted. Once writing works again, a line says how many.
class LineWriter {
 public:
  static constexpr size_t kMaxQueuedBytes = size_t{1} << 20;
  // Reserved on top of that for lines that say why something ended.
  static constexpr size_t kReservedBytes = size_t{64} << 10;

  // fd: must stay open as long as the process. notice: makes the line, with its newline, that says
  // how many lines were dropped. Create it by `new`, once: its thread lives as long as the process.
  LineWriter(int fd, std::function<std::string(uint64_t)> notice);
  LineWriter(const LineWriter&) = delete;
  LineWriter& operator=(const LineWriter&) = delete;
  ~LineWriter() = delete;

  // `line` includes its newline. is_urgent: it may use the reserve.
  void Write(std::string line, bool is_urgent = false);

  // Waits until all lines are written, or have been dropped; false after `timeout`.
  bool Flush(std::chrono::milliseconds timeout);

  // The number of lines dropped so far.
  uint64_t dropped() const { return dropped_; }

 private:
  void StartThread();
  void Run();
  void Put(const std::string& line);
  void PutNotice();
  bool PutAll(absl::string_view text);

  const int fd_;
  const std::function<std::string(uint64_t)> notice_;
  std::atomic<uint64_t> dropped_ = 0;

  // Used by the writing thread; for a regular file, by the holder of mutex_.
  uint64_t told_ = 0;     // the part of dropped_ that a notice has reported
  bool is_torn_ = false;  // the last write ended within a line

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::deque<std::string> queue_;
  size_t queued_bytes_ = 0;
  bool has_thread_ = false;
  bool is_writing_ = false;  // the thread has taken a line
};

// For the last words of a process that is about to abort: writes `text` to stderr; gives up after a
// second. Allocates nothing.
void WriteToStderrBounded(absl::string_view text);

}  // namespace isobit

#endif  // ISOBIT_COMMON_BASE_LINE_WRITER_H_
