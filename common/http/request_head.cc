// Reads heads line by line, and keeps the few headers that count.
#include "common/http/request_head.h"

#include <arpa/inet.h>

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace isobit {
namespace {

// A line of a head without its end, which is taken off `rest`.
absl::string_view TakeLine(absl::string_view& rest) {
  const size_t end = rest.find('\n');
  const absl::string_view line = rest.substr(0, end);
  rest.remove_prefix(end + 1);
  return absl::StripSuffix(line, "\r");
}

absl::Status CheckRequestLine(const std::vector<absl::string_view>& words) {
  if (words.size() != 3 || (words[2] != "HTTP/1.1" && words[2] != "HTTP/1.0")) {
    return absl::InvalidArgumentError("expected a request of HTTP/1.1");
  }
  if (words[0] != "GET" && words[0] != "HEAD") {
    return absl::UnimplementedError("expected the method GET or HEAD");
  }
  // No path here needs an escape, and with none a path has one spelling.
  const absl::string_view path = words[1].substr(0, words[1].find('?'));
  if (!absl::StartsWith(path, "/") || absl::StrContains(path, '%')) {
    return absl::NotFoundError("no such page");
  }
  return absl::OkStatus();
}

bool IsControl(char c) { return absl::ascii_iscntrl(c) && c != '\t'; }

absl::Status CheckHeaders(int num_hosts, bool needs_host) {
  if (num_hosts > 1) return absl::InvalidArgumentError("expected one header Host");
  if (num_hosts == 0 && needs_host) return absl::InvalidArgumentError("expected a header Host");
  return absl::OkStatus();
}

bool IsAddress(const std::string& name) {
  in6_addr address;
  return inet_pton(AF_INET, name.c_str(), &address) == 1 ||
         inet_pton(AF_INET6, name.c_str(), &address) == 1;
}

// A name or address in lower case, without port, brackets and the dot at its end.
std::string NameOf(absl::string_view host) {
  const bool is_bracketed = absl::ConsumePrefix(&host, "[");
  host = host.substr(0, host.find(is_bracketed ? ']' : ':'));
  return absl::AsciiStrToLower(absl::StripSuffix(host, "."));
}

}  // namespace

size_t HeadSize(absl::string_view received) {
  size_t begin = 0;  // of a line
  while (true) {
    const size_t end = received.find('\n', begin);
    if (end == absl::string_view::npos) return 0;
    const absl::string_view line = received.substr(begin, end - begin);
    if (begin > 0 && (line.empty() || line == "\r")) return end + 1;
    begin = end + 1;
  }
}

absl::StatusOr<RequestHead> ParseRequestHead(absl::string_view head) {
  const std::vector<absl::string_view> words = absl::StrSplit(TakeLine(head), ' ');
  if (absl::Status checked = CheckRequestLine(words); !checked.ok()) return checked;
  RequestHead request;
  request.path = absl::StrCat(words[1].substr(0, words[1].find('?')));
  request.text = absl::StrCat(words[0], " ", request.path, " ", words[2], "\r\n");
  int num_hosts = 0;
  while (true) {
    const absl::string_view line = TakeLine(head);
    if (line.empty()) break;
    const size_t colon = line.find(':');
    if (colon == 0 || colon == absl::string_view::npos || absl::ascii_isspace(line[0]) ||
        std::any_of(line.begin(), line.end(), IsControl)) {
      return absl::InvalidArgumentError("expected headers of the form 'Name: value'");
    }
    const absl::string_view name = line.substr(0, colon);
    const absl::string_view value = absl::StripAsciiWhitespace(line.substr(colon + 1));
    const bool is_host = absl::EqualsIgnoreCase(name, "Host");
    if (is_host) {
      ++num_hosts;
      request.host = absl::StrCat(value);
    }
    if (is_host || absl::EqualsIgnoreCase(name, "Authorization")) {
      absl::StrAppend(&request.text, name, ": ", value, "\r\n");
    }
  }
  if (absl::Status checked = CheckHeaders(num_hosts, words[2] == "HTTP/1.1"); !checked.ok()) {
    return checked;
  }
  request.text += "\r\n";
  return request;
}

HostNames::HostNames(const std::vector<std::string>& names) {
  for (const std::string& name : names) names_.push_back(NameOf(name));
}

bool HostNames::Allow(absl::string_view host) const {
  const std::string name = NameOf(host);
  if (name == "localhost" || IsAddress(name)) return true;
  return std::any_of(names_.begin(), names_.end(),
                     [&](const std::string& allowed) { return allowed == "*" || allowed == name; });
}

}  // namespace isobit
