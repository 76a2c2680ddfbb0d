// What binaries would take from a glibc newer than 2.34, the oldest that the wheels run with.
// Linked into programs by cmake/static_libraries.cmake, and into the operators by
// trainer_bridge/torch/CMakeLists.txt, which hides it.
#include <sys/random.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>

// std::random_device of libstdc++.a calls it. In glibc since 2.36.
extern "C" std::uint32_t arc4random() {
  std::uint32_t value = 0;
  // Four bytes come whole, or a signal came before the kernel's pool was ready.
  while (getrandom(&value, sizeof value, 0) != sizeof value) {
    if (errno != EINTR) std::abort();
  }
  return value;
}
