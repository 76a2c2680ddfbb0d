// The clients that may call: an access file names them, each with its roles. A client is recognised
// by a certificate or by a bearer token. docs/API.md describes the file.
#ifndef ISOBIT_COMMON_ACCESS_ACCESS_LIST_H_
#define ISOBIT_COMMON_ACCESS_ACCESS_LIST_H_

#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/access/method_roles.h"
#include "common/base/file_stamp.h"

namespace isobit {

using TokenHash = std::array<unsigned char, 32>;  // SHA-256 of a bearer token

// Whether they are equal. The time taken depends on the length of `shown` alone.
bool SameSecret(absl::string_view shown, absl::string_view secret);

// One client of an access file.
struct AccessClient {
  std::string name;
  RoleSet roles;
  std::vector<TokenHash> tokens;
  std::vector<std::string> certificates;  // names in its certificates
};

// The content of one access file. Immutable.
class AccessList {
 public:
  // `source` names the text in errors. INVALID_ARGUMENT, naming the place: the format is wrong; a
  // field or role is unknown; a client has no name, roles or credentials, or occurs twice; two
  // clients share a name, token or certificate.
  static absl::StatusOr<AccessList> Parse(absl::string_view text, const std::string& source);

  // The client of this bearer token; null if there is none. The time taken reveals neither how much
  // of a hash is right nor whose token it is.
  const AccessClient* ByToken(absl::string_view token) const;
  // The first client with one of a certificate's names; null if there is none.
  const AccessClient* ByCertificate(absl::Span<const std::string> names) const;

  size_t num_clients() const { return clients_.size(); }

 private:
  std::vector<AccessClient> clients_;
};

// An access file that is read again when it changes. If it is then broken or missing, the old list
// stays in force and the error is logged. Thread-safe.
class AccessFile {
 public:
  // Errors: those of AccessList::Parse; NOT_FOUND and others: the file cannot be read.
  static absl::StatusOr<std::shared_ptr<AccessFile>> Open(std::string path);

  // The list currently in force.
  std::shared_ptr<const AccessList> Current();

 private:
  explicit AccessFile(std::string path) : path_(std::move(path)) {}
  absl::Status Load();  // holds mutex_

  const std::string path_;
  std::mutex mutex_;  // guards all below
  FileStamp stamp_;   // of the content read last, good or bad
  std::string text_;  // the text from which list_ was made
  std::shared_ptr<const AccessList> list_;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_ACCESS_ACCESS_LIST_H_
