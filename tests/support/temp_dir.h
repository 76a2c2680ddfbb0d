// A directory that lives as long as the object: for tests that need real files.
#ifndef ISOBIT_TESTS_SUPPORT_TEMP_DIR_H_
#define ISOBIT_TESTS_SUPPORT_TEMP_DIR_H_

#include <string>

namespace isobit::testing_support {

class TempDir {
 public:
  TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  ~TempDir();  // removes the directory with its contents

  // Canonical and absolute, without a trailing slash.
  const std::string& path() const { return path_; }

  // The path of `name` inside the directory; creates nothing.
  std::string File(const std::string& name) const { return path_ + "/" + name; }

  // Writes `contents` to `name`, replacing what is there, and returns the file's path.
  std::string Write(const std::string& name, const std::string& contents) const;

 private:
  std::string path_;
};

}  // namespace isobit::testing_support

#endif  // ISOBIT_TESTS_SUPPORT_TEMP_DIR_H_
