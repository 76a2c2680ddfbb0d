// Creates and removes the directories of TempDir.
#include "tests/support/temp_dir.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "common/base/check.h"

namespace isobit::testing_support {

TempDir::TempDir() {
  std::string pattern = (std::filesystem::temp_directory_path() / "isobit_test_XXXXXX").string();
  ISOBIT_CHECK(mkdtemp(pattern.data()) != nullptr) << pattern;
  path_ = std::filesystem::canonical(pattern).string();
}

TempDir::~TempDir() {
  std::error_code ignored;  // a failure to remove it must not hide the test's own result
  std::filesystem::remove_all(path_, ignored);
}

std::string TempDir::Write(const std::string& name, const std::string& contents) const {
  const std::string path = File(name);
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(contents.data(), static_cast<std::streamsize>(contents.size()));
  out.close();
  ISOBIT_CHECK(out.good()) << path;
  return path;
}

}  // namespace isobit::testing_support
