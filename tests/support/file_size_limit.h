// A disk that takes no more: for tests of files that can be written only in part, or not at all.
#ifndef ISOBIT_TESTS_SUPPORT_FILE_SIZE_LIMIT_H_
#define ISOBIT_TESTS_SUPPORT_FILE_SIZE_LIMIT_H_

#include <signal.h>
#include <sys/resource.h>

namespace isobit::testing_support {

// Lets files grow to that size and no further, as long as it lives.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit low = {bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &low);
    old_handler_ = signal(SIGXFSZ, SIG_IGN);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    signal(SIGXFSZ, old_handler_);
  }

 private:
  rlimit before_;
  sighandler_t old_handler_;
};

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_SUPPORT_FILE_SIZE_LIMIT_H_
