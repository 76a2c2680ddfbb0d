// Cuts text between two UTF-8 characters.
#include "common/base/shorten.h"

#include "absl/strings/str_cat.h"

namespace isobit {

std::string Shorten(std::string text, size_t max_bytes) {
  if (text.size() <= max_bytes) return text;
  const size_t size = text.size();
  size_t end = max_bytes;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  text.resize(end);
  absl::StrAppend(&text, "... (", size, " bytes)");
  return text;
}

}  // namespace isobit
