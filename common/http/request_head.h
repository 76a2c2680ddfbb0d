// The head of an HTTP request, reduced to what this server reads.
#ifndef ISOBIT_COMMON_HTTP_REQUEST_HEAD_H_
#define ISOBIT_COMMON_HTTP_REQUEST_HEAD_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace isobit {

struct RequestHead {
  std::string path;  // of the target; without its query
  std::string host;  // the header Host; empty: absent, as HTTP/1.0 allows
  // For the library: the request line without the query, and the headers Host and Authorization.
  // Other headers would only make it do more: ranges, compression, a body.
  std::string text;
};

// The size of the head in `received`, including the empty line that ends it; 0: it has no end yet.
size_t HeadSize(absl::string_view received);

// `head` has HeadSize bytes. INVALID_ARGUMENT: it is no HTTP/1.0 or 1.1 request, a line is no
// header, or there is not exactly one header Host. UNIMPLEMENTED: the method is not GET or HEAD.
// NOT_FOUND: the target is no plain path.
absl::StatusOr<RequestHead> ParseRequestHead(absl::string_view head);

// The names by which a browser may call a server. A web site can make its own name resolve to a
// reader's loopback address (DNS rebinding), and could then read the server's answers. Only the
// header Host reveals that.
class HostNames {
 public:
  // In addition to loopback's names and to addresses, which no site can claim. "*": every name.
  explicit HostNames(const std::vector<std::string>& names);

  // `host`: a header Host. Ignores its port, upper case and a dot at its end.
  bool Allow(absl::string_view host) const;

 private:
  std::vector<std::string> names_;  // in lower case
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_HTTP_REQUEST_HEAD_H_
