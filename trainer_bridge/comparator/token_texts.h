// The texts of tokens, for people. They are read from a Hugging Face tokenizer.json.
#ifndef ISOBIT_TRAINER_BRIDGE_COMPARATOR_TOKEN_TEXTS_H_
#define ISOBIT_TRAINER_BRIDGE_COMPARATOR_TOKEN_TEXTS_H_

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace isobit {

class TokenTexts {
 public:
  // Without texts.
  TokenTexts() = default;

  // NOT_FOUND and others: the file cannot be read. INVALID_ARGUMENT: it is no tokenizer with a
  // vocabulary, or is larger than 64 MiB.
  static absl::StatusOr<TokenTexts> Read(const std::string& path);

  bool empty() const { return texts_.empty(); }

  // The token's bytes, which may be part of a character; empty: unknown.
  std::string Of(uint32_t token_id) const;

 private:
  explicit TokenTexts(std::unordered_map<uint32_t, std::string> texts) : texts_(std::move(texts)) {}

  std::unordered_map<uint32_t, std::string> texts_;
};

// The bytes that a token's name stands for. Byte-level vocabularies write each byte as one
// character: printable bytes as themselves, the others as U+0100 and up, in ascending order. Other
// vocabularies write a space as U+2581 and a byte as <0x0A>.
std::string BytesOfTokenName(absl::string_view name, bool is_byte_level);

}  // namespace isobit

#endif  // ISOBIT_TRAINER_BRIDGE_COMPARATOR_TOKEN_TEXTS_H_
