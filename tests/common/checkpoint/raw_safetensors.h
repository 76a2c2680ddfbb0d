// Builds safetensors bytes from a header given as text, so that tests can write what no correct
// writer would.
#ifndef ISOBIT_TESTS_COMMON_CHECKPOINT_RAW_SAFETENSORS_H_
#define ISOBIT_TESTS_COMMON_CHECKPOINT_RAW_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace isobit {

inline std::string RawSafetensors(const std::string& header, const std::string& data) {
  std::string file;
  for (int i = 0; i < 8; ++i) {
    file += static_cast<char>(static_cast<uint64_t>(header.size()) >> (8 * i));
  }
  return file + header + data;
}

// One BF16 tensor of shape [elements] with all bytes zero.
inline std::string RawSafetensors(const std::string& tensor_name, size_t elements) {
  const std::string bytes = std::to_string(2 * elements);
  return RawSafetensors("{\"" + tensor_name + R"(":{"dtype":"BF16","shape":[)" +
                            std::to_string(elements) + R"(],"data_offsets":[0,)" + bytes + "]}}",
                        std::string(2 * elements, '\0'));
}

}  // namespace isobit

#endif  // ISOBIT_TESTS_COMMON_CHECKPOINT_RAW_SAFETENSORS_H_
