// The main function of a fuzzing target without libFuzzer: runs it on every file of the directories
// that its arguments name, and fails if an input takes too long or too much memory.
#include <sys/resource.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

constexpr std::chrono::seconds kMaxTime(10);

// Returns false if the input took too long.
bool Replay(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  const auto start = std::chrono::steady_clock::now();
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  if (std::chrono::steady_clock::now() - start < kMaxTime) return true;
  std::fprintf(stderr, "%s took over %lld s\n", path.c_str(),
               static_cast<long long>(kMaxTime.count()));
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  int num_inputs = 0;
  bool passed = true;
  for (int i = 1; i < argc; ++i) {
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
      passed = Replay(entry.path()) && passed;
      ++num_inputs;
    }
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  std::printf("%d inputs, at most %ld MB\n", num_inputs, usage.ru_maxrss >> 10);
#ifndef ISOBIT_SANITIZED  // a sanitizer's own memory would count
  passed = passed && usage.ru_maxrss <= 256 << 10;
#endif
  return passed && num_inputs > 0 ? 0 : 1;
}
