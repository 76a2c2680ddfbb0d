// Makes the lines, with bounded texts, and appends them.
#include "common/rpc/audit_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/base/descriptor.h"
#include "common/base/file_error.h"
#include "common/base/log.h"
#include "common/base/private_file.h"
#include "common/base/status_macros.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "google/protobuf/text_format.h"
#include "nlohmann/json.hpp"

namespace isobit {
namespace {

constexpr std::chrono::seconds kRefusalInterval(1);
constexpr size_t kMaxText = 512;

constexpr char kFlag[] = "--audit_log";

// Of all audit logs of the process.
std::atomic<uint64_t> num_lost = 0;

// Lines have what admins ask, which may be tokens.
absl::StatusOr<Descriptor> OpenForAppend(const std::string& path) {
  return OpenPrivateFile(path, O_WRONLY | O_APPEND | O_CREAT, kFlag);
}

bool IsFifo(const std::string& path) {
  struct stat info = {};
  return lstat(path.c_str(), &info) == 0 && S_ISFIFO(info.st_mode);
}

// One write if the system accepts the whole line, so that lines of several processes do not mix.
// is_torn: whether only a part of it is there.
absl::Status Append(const std::string& path, absl::string_view line, bool& is_torn) {
  ISOBIT_ASSIGN_OR_RETURN(const Descriptor file, OpenForAppend(path));
  while (!line.empty()) {
    const ssize_t written = write(file.get(), line.data(), line.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return FileError(errno, absl::StrCat(kFlag, " ", path));
    line.remove_prefix(static_cast<size_t>(written));
    is_torn = !line.empty();
  }
  return absl::OkStatus();
}

std::string Cut(std::string text) {
  if (text.size() > kMaxText) text.replace(kMaxText, std::string::npos, "...");
  return text;
}

std::string LineOf(const AuditEntry& entry, int64_t num_left_out) {
  nlohmann::ordered_json line = {
      {"time", absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", absl::Now(), absl::UTCTimeZone())},
      {"client", Cut(entry.client)},
      {"peer", Cut(entry.caller_address)},
      {"method", Cut(entry.method)},
      {"arguments", entry.arguments},
      {"outcome", absl::StatusCodeToString(entry.outcome.code())}};
  if (!entry.outcome.ok()) line["message"] = Cut(absl::StrCat(entry.outcome.message()));
  if (num_left_out > 0) line["refusals_left_out"] = num_left_out;
  // Writes ASCII, and replaces bytes that are not UTF-8.
  return line.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

}  // namespace

absl::StatusOr<std::unique_ptr<AuditLog>> AuditLog::Open(std::string path) {
  if (!path.empty()) {
    const absl::Status opened = OpenForAppend(path).status();
    if (!opened.ok() && !IsFifo(path)) return opened;
    if (!opened.ok()) {
      ISOBIT_LOG(Warning) << kFlag << " " << path << ": a FIFO that nobody reads yet; until then "
                          << "its lines go to this log";
    }
  }
  return std::unique_ptr<AuditLog>(new AuditLog(std::move(path)));
}

void AuditLog::Write(const AuditEntry& entry) {
  const std::lock_guard lock(mutex_);
  WriteLine(entry, 0);
}

void AuditLog::WriteRefused(const AuditEntry& entry) {
  const std::lock_guard lock(mutex_);
  const auto now = std::chrono::steady_clock::now();
  if (now - last_refusal_ < kRefusalInterval) {
    ++num_left_out_;
    return;
  }
  last_refusal_ = now;
  WriteLine(entry, std::exchange(num_left_out_, 0));
}

void AuditLog::WriteLine(const AuditEntry& entry, int64_t num_left_out) {
  std::string line = LineOf(entry, num_left_out);
  if (path_.empty()) {
    ISOBIT_LOG(Info) << "audit " << line;
    return;
  }
  // A line that is there in part must not take the next one with it.
  line = absl::StrCat(is_torn_ ? "\n" : "", line, "\n");
  if (const absl::Status written = Append(path_, line, is_torn_); !written.ok()) {
    ++num_lost;
    ISOBIT_LOG(Error) << written.message() << "; the line was: audit " << line;
  }
}

uint64_t AuditLinesLost() { return num_lost; }

std::string BoundedText(const google::protobuf::Message& message) {
  std::array<char, kMaxText> buffer;
  google::protobuf::io::ArrayOutputStream out(buffer.data(), static_cast<int>(buffer.size()));
  google::protobuf::TextFormat::Printer printer;
  printer.SetSingleLineMode(true);
  printer.SetTruncateStringFieldLongerThan(kMaxText / 2);
  const bool is_whole = printer.Print(message, &out);
  std::string text(buffer.data(), static_cast<size_t>(out.ByteCount()));
  return is_whole ? std::string(absl::StripTrailingAsciiWhitespace(text))
                  : absl::StrCat(text, "...");
}

}  // namespace isobit
