// Writes compared samples to files that `isobit audit` reads. No comparison waits for a disk: a
// sample that finds the queue full is dropped and counted. A file ends with a seal when it is full
// or when the comparator ends; after a crash it has none.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_RECORDING_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_RECORDING_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/metrics/metrics.h"
#include "isobit/v1/rollout.pb.h"

namespace isobit {

struct RecordingOptions {
  std::string path;
  size_t max_file_bytes = size_t{1} << 30;     // then the file is renamed path.1, path.1 path.2
  int max_old_files = 8;                       // path.1 to path.8; the oldest is deleted
  size_t max_queued_bytes = size_t{64} << 20;  // of messages waiting to be written
};

// Counts samples by outcome.
struct RecordingMetrics {
  explicit RecordingMetrics(Metrics& metrics);

  prometheus::Counter& written;
  prometheus::Counter& dropped;
  prometheus::Counter& skipped;
  prometheus::Counter& failed;
};

// Thread-safe.
class Recording {
 public:
  // Renames an existing file to path.1, since each run begins a new file. `metrics` outlive the
  // object. Errors: those of FileError; FAILED_PRECONDITION: another process records there.
  static absl::StatusOr<std::unique_ptr<Recording>> Open(const RecordingOptions& options,
                                                         const RecordingMetrics& metrics);
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  ~Recording();  // calls End

  // Never waits for the disk. After End a sample is dropped.
  void Add(v1::TappedSample sample);

  // Writes waiting samples and the seal, and closes the file. A program calls it before it ends:
  // calls that still hold the recording may outlive its last thread.
  void End();

 private:
  Recording(const RecordingOptions& options, const RecordingMetrics& metrics)
      : options_(options), metrics_(metrics) {}

  void Run();
  void Write(const v1::TappedSample& sample);
  // Renames the existing files and begins a new one.
  absl::Status Rotate();
  absl::Status Append(const std::string& text);
  // Seals the file, unless it is empty, and closes it.
  void Close();

  const RecordingOptions options_;
  const RecordingMetrics& metrics_;

  // Used only by the writing thread.
  int file_ = -1;
  size_t size_ = 0;     // bytes
  uint64_t lines_ = 0;  // of samples
  std::string sum_;     // the checksum of the file's last line
  bool fails_ = false;  // whether the last write failed

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::deque<v1::TappedSample> queue_;
  size_t queued_bytes_ = 0;
  bool is_full_ = false;  // whether the last Add found it so
  bool ends_ = false;

  std::thread writer_;
};

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_RECORDING_H_
