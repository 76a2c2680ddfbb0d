// Fuzzes a model directory: its index of shards, and the shards. The input is divided at its first
// two zero bytes: model.safetensors.index.json, then the shards "a" and "b".
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/check.h"
#include "common/checkpoint/checkpoint.h"
#include "tests/fuzz/fuzz_check.h"

namespace {

// A directory in memory, removed at exit.
class Directory {
 public:
  Directory() : path_(absl::StrCat("/dev/shm/checkpoint_fuzz.", getpid())) {
    std::filesystem::create_directory(path_);
  }
  ~Directory() { std::filesystem::remove_all(path_); }

  const std::string& path() const { return path_; }
  void Write(const char* name, absl::string_view bytes) const {
    std::ofstream file(path_ + "/" + name, std::ios::binary | std::ios::trunc);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }

 private:
  const std::string path_;
};

// Returns what comes before the next zero byte, and removes it and that byte from `rest`.
absl::string_view TakePart(absl::string_view& rest) {
  const absl::string_view part = rest.substr(0, rest.find('\0'));
  rest.remove_prefix(std::min(rest.size(), part.size() + 1));
  return part;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Directory directory;
  absl::string_view rest(reinterpret_cast<const char*>(data), size);
  directory.Write("model.safetensors.index.json", TakePart(rest));
  // A shard holds zero bytes itself: its length comes first, in decimal.
  size_t length = 0;
  for (const char digit : TakePart(rest)) {
    if (digit < '0' || digit > '9') break;
    length = std::min(rest.size(), length * 10 + static_cast<size_t>(digit - '0'));
  }
  directory.Write("a", rest.substr(0, length));
  directory.Write("b", rest.substr(length));
  const auto checkpoint = isobit::Checkpoint::Open(directory.path());
  if (!checkpoint.ok()) {
    isobit::fuzz::CheckRefusal(checkpoint.status());
    return 0;
  }
  for (size_t i = 0; i < checkpoint->tensors().size(); ++i) {
    std::vector<uint8_t> bytes(checkpoint->tensors()[i].size_bytes);
    ISOBIT_CHECK(checkpoint->Read(i, 0, bytes.size(), bytes.data()).ok());
  }
  return 0;
}
