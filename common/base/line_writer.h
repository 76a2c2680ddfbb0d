// Writes lines to a descriptor whose reader may be slow, stopped or gone (stderr, stdout), so that
// no caller ever waits for it, or dies of it. Not here: what is in a line, and files of evidence.
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

// Thread-safe. A regular file gets each line at once. For anything else a thread of the writer's
// own writes, and the others leave their lines in a queue; lines that find it full, or that nobody
// takes any more, are dropped and counted. Once writing works again, a line says how many.
class LineWriter {
 public:
  static constexpr size_t kMaxQueuedBytes = size_t{1} << 20;
  // Beyond that, for lines that say why something ended.
  static constexpr size_t kReservedBytes = size_t{64} << 10;

  // fd: stays open as long as the process. notice: the line, with its end, that says how many were
  // dropped. Make it by `new`, once: its thread lives as long as the process.
  LineWriter(int fd, std::function<std::string(uint64_t)> notice);
  LineWriter(const LineWriter&) = delete;
  LineWriter& operator=(const LineWriter&) = delete;
  ~LineWriter() = delete;

  // `line` has its end of line. is_urgent: it may take of the reserve.
  void Write(std::string line, bool is_urgent = false);

  // Waits until all lines are written, or have been dropped; false after `timeout`.
  bool Flush(std::chrono::milliseconds timeout);

  // Lines so far that nobody got.
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

  // Of whoever writes: the thread, or for a regular file the holder of mutex_.
  uint64_t told_ = 0;     // of dropped_
  bool is_torn_ = false;  // the last write ended within a line

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::deque<std::string> queue_;
  size_t queued_bytes_ = 0;
  bool has_thread_ = false;
  bool is_writing_ = false;  // the thread has taken a line
};

// For the last words of a process that is about to abort: writes `text` to stderr, and gives up
// after a second. Allocates nothing.
void WriteToStderrBounded(absl::string_view text);

}  // namespace isobit

#endif  // ISOBIT_COMMON_BASE_LINE_WRITER_H_
