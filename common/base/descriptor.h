// A file descriptor that is closed by its owner.
#ifndef ISOBIT_COMMON_BASE_DESCRIPTOR_H_
#define ISOBIT_COMMON_BASE_DESCRIPTOR_H_

#include <unistd.h>

#include <utility>

namespace isobit {

// An open descriptor, or none (-1). The destructor closes it.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.Release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    other.Close();
    return *this;
  }
  ~Descriptor() { Close(); }

  bool is_open() const { return fd_ >= 0; }
  int get() const { return fd_; }

  // Returns the descriptor; the caller now owns it.
  int Release() { return std::exchange(fd_, -1); }

  void Close() {
    if (is_open()) close(Release());
  }

 private:
  int fd_;
};

}  // namespace isobit

#endif  // ISOBIT_COMMON_BASE_DESCRIPTOR_H_
