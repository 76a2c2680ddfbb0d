// The head of an HTTP request: what of it this server reads, and nothing else.
#ifndef ISOBIT_COMMON_HTTP_REQUEST_HEAD_H_
#define ISOBIT_COMMON_HTTP_REQUEST_HEAD_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace isobit {

struct RequestHead {
  std::string path;  // of the target; without its query
  std::string host;  // the header Host; empty: there is none, as HTTP/1.0 allows
  // What the library gets: the request line without the query, and the headers Host and
  // Authorization. Every other header only makes it do more: ranges, compression, a body.
  std::string text;
};

// The number of bytes of `received` up to and with the empty line that ends a head; 0: it has none.
size_t HeadSize(absl::string_view received);

// `head`: of HeadSize bytes. INVALID_ARGUMENT: no request of HTTP/1.0 or 1.1, a line that is no
// header, no or two headers Host. UNIMPLEMENTED: a method other than GET and HEAD. NOT_FOUND: a
// target that is no plain path.
absl::StatusOr<RequestHead> ParseRequestHead(absl::string_view head);

// The names by which a browser may call a server. A site can make its own name lead to a
// reader's loopback (DNS rebinding), and would then be allowed to read what it gets; only the
// header Host tells.
class HostNames {
 public:
  // Beside loopback's names, and addresses, which no other site can claim. "*": every name.
  explicit HostNames(const std::vector<std::string>& names);

  // `host`: a header Host. Its port does not count, nor do upper case and a dot at its end.
  bool Allow(absl::string_view host) const;

 private:
  std::vector<std::string> names_;  // in lower case
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_HTTP_REQUEST_HEAD_H_
