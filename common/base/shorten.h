// Text of bounded length.
#ifndef ISOBIT_COMMON_BASE_SHORTEN_H_
#define ISOBIT_COMMON_BASE_SHORTEN_H_

#include <cstddef>
#include <string>

namespace isobit {

// Returns `text` if it has at most `max_bytes` bytes. Otherwise cuts it to at most `max_bytes`
// bytes, between two UTF-8 characters, and appends "... (N bytes)", where N is the uncut size.
std::string Shorten(std::string text, size_t max_bytes);

}  // namespace isobit

#endif  // ISOBIT_COMMON_BASE_SHORTEN_H_
