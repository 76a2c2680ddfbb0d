// The queue, the thread that writes, and the change of files.
#include "trainer_bridge/comparator/recording.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <ctime>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/file_error.h"
#include "common/base/log.h"
#include "common/base/private_file.h"
#include "common/base/status_macros.h"
#include "trainer_bridge/comparator/recording_line.h"

namespace isobit {
namespace {

constexpr char kSamples[] = "isobit_recorded_samples_total";
constexpr char kSamplesHelp[] =
    "Compared samples for --record_file: written, dropped as the disk was slow, skipped as they "
    "have "
    "no tokens or tokens of several weights, or failed to be written.";

// Takes the lock of a file that is recorded to, as isobit.recording does. It ends with the file's
// last descriptor.
absl::Status LockFile(int file, const std::string& path) {
  if (flock(file, LOCK_EX | LOCK_NB) == 0) return absl::OkStatus();
  if (errno == EWOULDBLOCK) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": another process records there"));
  }
  return FileError(errno, absl::StrCat("cannot lock ", path));
}

// Whether a file that may be there can be renamed: nobody records to it.
absl::Status CheckUnused(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (file < 0) return absl::OkStatus();  // what is wrong with it shows when it is replaced
  const absl::Status status = LockFile(file, path);
  close(file);
  return status;
}

}  // namespace

RecordingMetrics::RecordingMetrics(Metrics& metrics)
    : written(metrics.AddCounter(kSamples, kSamplesHelp, {{"outcome", "written"}})),
      dropped(metrics.AddCounter(kSamples, kSamplesHelp, {{"outcome", "dropped"}})),
      skipped(metrics.AddCounter(kSamples, kSamplesHelp, {{"outcome", "skipped"}})),
      failed(metrics.AddCounter(kSamples, kSamplesHelp, {{"outcome", "failed"}})) {}

absl::StatusOr<std::unique_ptr<Recording>> Recording::Open(const RecordingOptions& options,
                                                           const RecordingMetrics& metrics) {
  std::unique_ptr<Recording> recording(new Recording(options, metrics));
  ISOBIT_RETURN_IF_ERROR(recording->Rotate());
  recording->writer_ = std::thread([self = recording.get()] { self->Run(); });
  return recording;
}

Recording::~Recording() { End(); }

void Recording::End() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
    changed_.notify_all();
  }
  if (writer_.joinable()) writer_.join();
  Close();
}

void Recording::Close() {
  if (file_ < 0) return;
  if (lines_ > 0) {
    const absl::Status sealed = Append(MakeRecordingSeal(lines_, sum_).text);
    if (!sealed.ok()) ISOBIT_LOG(Warning) << "recording: no seal: " << sealed.ToString();
  }
  if (file_ >= 0) close(std::exchange(file_, -1));
}

void Recording::Add(v1::TappedSample sample) {
  if (!IsRecordable(sample)) return metrics_.skipped.Increment();
  const std::lock_guard lock(mutex_);
  const size_t bytes = sample.ByteSizeLong();
  if (ends_) return metrics_.dropped.Increment();
  const bool is_full = queued_bytes_ + bytes > options_.max_queued_bytes;
  if (is_full != std::exchange(is_full_, is_full) && is_full) {
    ISOBIT_LOG(Warning) << "recording: samples are dropped, as " << options_.path
                        << " takes them too slowly";
  }
  if (is_full) return metrics_.dropped.Increment();
  queued_bytes_ += bytes;
  queue_.push_back(std::move(sample));
  changed_.notify_all();
}

void Recording::Run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ends_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const v1::TappedSample sample = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    const size_t bytes = sample.ByteSizeLong();
    Write(sample);
    lock.lock();
    queued_bytes_ -= std::min(queued_bytes_, bytes);
    if (queue_.empty()) queued_bytes_ = 0;
  }
}

void Recording::Write(const v1::TappedSample& sample) {
  absl::Status status = size_ >= options_.max_file_bytes || file_ < 0 ? Rotate() : absl::OkStatus();
  if (status.ok()) {
    RecordingLine line = MakeRecordingLine(sample, std::time(nullptr), sum_);
    status = Append(line.text);
    if (status.ok()) {
      sum_ = std::move(line.sum);
      ++lines_;
    }
  }
  (status.ok() ? metrics_.written : metrics_.failed).Increment();
  if (status.ok() == std::exchange(fails_, !status.ok())) {
    ISOBIT_LOG(Warning) << "recording: "
                        << (status.ok() ? "samples are written again" : status.ToString());
  }
}

absl::Status Recording::Append(const std::string& text) {
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t count = write(file_, text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count >= 0) {
      done += static_cast<size_t>(count);
      continue;
    }
    const absl::Status failed = FileError(errno, absl::StrCat("cannot write ", options_.path));
    // No line may stay half written; a file that cannot be mended is left behind.
    if (ftruncate(file_, static_cast<off_t>(size_)) != 0) {
      close(std::exchange(file_, -1));
    }
    return failed;
  }
  size_ += text.size();
  return absl::OkStatus();
}

absl::Status Recording::Rotate() {
  Close();
  ISOBIT_RETURN_IF_ERROR(CheckUnused(options_.path));
  const auto name = [&](int number) {
    return number == 0 ? options_.path : absl::StrCat(options_.path, ".", number);
  };
  struct stat info = {};
  const bool exists = lstat(options_.path.c_str(), &info) == 0;
  if (exists && !S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(
        options_.path, ": expected a regular file or none, got ",
        S_ISLNK(info.st_mode) ? "a symbolic link, which may lead anywhere" : "something else"));
  }
  if (exists && info.st_size > 0) {
    // Earlier prompts are nobody else's business, either.
    ISOBIT_RETURN_IF_ERROR(OpenPrivateFile(options_.path, O_WRONLY, "").status());
    if (stat(name(options_.max_old_files).c_str(), &info) == 0) {
      ISOBIT_LOG(Warning) << "recording: " << name(options_.max_old_files) << " is deleted";
    }
    for (int number = options_.max_old_files; number > 0; --number) {
      // The older ones may not be there.
      if (std::rename(name(number - 1).c_str(), name(number).c_str()) != 0 && errno != ENOENT) {
        return FileError(errno, absl::StrCat("cannot rename ", name(number - 1)));
      }
    }
  } else if (exists && unlink(options_.path.c_str()) != 0) {
    return FileError(errno, absl::StrCat("cannot replace ", options_.path));
  }
  // A new file, which nobody has opened before.
  ISOBIT_ASSIGN_OR_RETURN(
      Descriptor file,
      OpenPrivateFile(options_.path, O_WRONLY | O_CREAT | O_EXCL | O_APPEND, "cannot open"));
  file_ = file.Release();
  if (absl::Status locked = LockFile(file_, options_.path); !locked.ok()) {
    close(std::exchange(file_, -1));
    return locked;
  }
  size_ = 0;
  lines_ = 0;
  sum_.clear();
  return absl::OkStatus();
}

}  // namespace isobit
