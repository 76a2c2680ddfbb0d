// Text of bounded length.
#ifndef ISOBIT_COMMON_BASE_SHORTEN_H_
#define ISOBIT_COMMON_BASE_SHORTEN_H_

#include <cstddef>
#include <string>

namespace isobit {

// `text`, or at most its first `max_bytes` bytes, whole characters of UTF-8, and "... (N bytes)"
// with the size of all.
std::string Shorten(std::string text, size_t max_bytes);

}  // namespace isobit

#endif  // ISOBIT_COMMON_BASE_SHORTEN_H_
