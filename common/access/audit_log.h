// The audit log: one line for each call that uses the role admin or tries to. It says who asked for
// what, and the outcome. Each line is one JSON object, so that nothing a client sends can forge a
// line.
#ifndef ISOBIT_COMMON_ACCESS_AUDIT_LOG_H_
#define ISOBIT_COMMON_ACCESS_AUDIT_LOG_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "google/protobuf/message.h"

namespace isobit {

struct AuditEntry {
  std::string client;          // as CallGate names it
  std::string caller_address;  // empty where it is not known
  std::string method;          // such as "/isobit.v1.RolloutService/UpdateWeights"
  std::string arguments;       // BoundedText of the request
  absl::Status outcome;
};

// Thread-safe.
class AuditLog {
 public:
  // Appends lines to the file `path`. It is opened for each line, so that it may be rotated, and
  // only its owner can read it (private_file.h). If `path` is empty, lines go to the service's log.
  // A line that the file does not take (or a FIFO not at once) is counted and goes to the log
  // instead. Errors: the file cannot be opened.
  static absl::StatusOr<std::unique_ptr<AuditLog>> Open(std::string path);

  void Write(const AuditEntry& entry);
  // For refused calls, which strangers can make as often as they like. Writes at most one such line
  // per second, with the number of lines skipped before it.
  void WriteRefused(const AuditEntry& entry);

 private:
  explicit AuditLog(std::string path) : path_(std::move(path)) {}
  void WriteLine(const AuditEntry& entry, int64_t num_left_out);

  const std::string path_;
  std::mutex mutex_;  // guards all below
  std::chrono::steady_clock::time_point last_refusal_;
  int64_t num_left_out_ = 0;
  bool is_torn_ = false;  // the last line was written only in part
};

// The number of this process's audit lines that did not reach --audit_log's file.
uint64_t AuditLinesLost();

// `message` as text on one line, cut after 512 bytes.
std::string BoundedText(const google::protobuf::Message& message);

}  // namespace isobit

#endif  // ISOBIT_COMMON_ACCESS_AUDIT_LOG_H_
