// The vocabulary of tokenizer.json, and byte-level names turned back into bytes.
#include "trainer_bridge/comparator/token_texts.h"

#include <sys/stat.h>

#include <array>
#include <cerrno>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/base/file_error.h"
#include "common/base/status_macros.h"

namespace isobit {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxBytes = 64 << 20;

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  const std::string what = absl::StrCat("--tokenizer ", path);
  struct stat info;
  if (stat(path.c_str(), &info) != 0) return FileError(errno, what);
  if (!S_ISREG(info.st_mode) || info.st_size > kMaxBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": expected a file tokenizer.json of at most 64 MiB"));
  }
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) return absl::UnknownError(absl::StrCat(what, ": cannot be read"));
  return text.str();
}

bool IsPrintedAsItself(unsigned byte) {
  return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
}

// By code point: the byte that a byte-level vocabulary writes as it, or -1.
const std::array<int, 512>& ByteOfCodePoint() {
  static const auto* const table = [] {
    auto* bytes = new std::array<int, 512>;
    bytes->fill(-1);
    size_t next = 256;
    for (unsigned byte = 0; byte < 256; ++byte) {
      (*bytes)[IsPrintedAsItself(byte) ? byte : next++] = static_cast<int>(byte);
    }
    return bytes;
  }();
  return *table;
}

// The first code point of `text`, which loses it, if that takes at most two bytes.
std::optional<unsigned> TakeCodePoint(absl::string_view& text) {
  const auto first = static_cast<unsigned char>(text[0]);
  if (first < 0x80) {
    text.remove_prefix(1);
    return first;
  }
  if ((first & 0xE0) != 0xC0 || text.size() < 2) return std::nullopt;
  const unsigned code = ((first & 0x1Fu) << 6) | (static_cast<unsigned char>(text[1]) & 0x3Fu);
  text.remove_prefix(2);
  return code;
}

// Whether `node`, a pre-tokenizer or decoder, is byte-level, or a sequence that has one.
bool IsByteLevel(const Json& node) {
  if (!node.is_object()) return false;
  if (node.value("type", "") == "ByteLevel") return true;
  for (const char* const list : {"pretokenizers", "decoders"}) {
    const auto found = node.find(list);
    if (found == node.end() || !found->is_array()) continue;
    for (const Json& item : *found) {
      if (IsByteLevel(item)) return true;
    }
  }
  return false;
}

}  // namespace

std::string BytesOfTokenName(absl::string_view name, bool is_byte_level) {
  if (!is_byte_level) {
    int byte = 0;
    if (name.size() == 6 && absl::StartsWith(name, "<0x") && name[5] == '>' &&
        absl::SimpleHexAtoi(name.substr(3, 2), &byte)) {
      return {static_cast<char>(byte)};
    }
    return absl::StrReplaceAll(name, {{"\u2581", " "}});
  }
  std::string bytes;
  absl::string_view rest = name;
  while (!rest.empty()) {
    const std::optional<unsigned> code = TakeCodePoint(rest);
    if (!code || *code >= ByteOfCodePoint().size() || ByteOfCodePoint()[*code] < 0) {
      return absl::StrCat(name);  // such as a special token
    }
    bytes.push_back(static_cast<char>(ByteOfCodePoint()[*code]));
  }
  return bytes;
}

absl::StatusOr<TokenTexts> TokenTexts::Read(const std::string& path) {
  ISOBIT_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  const Json file = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  const absl::Status bad = absl::InvalidArgumentError(
      absl::StrCat("--tokenizer ", path, ": expected a tokenizer.json with model.vocab"));
  if (!file.is_object() || !file.contains("model") || !file["model"].is_object()) return bad;
  const auto vocab = file["model"].find("vocab");
  if (vocab == file["model"].end() || !vocab->is_object()) return bad;
  const bool is_byte_level = IsByteLevel(file.value("pre_tokenizer", Json())) ||
                             IsByteLevel(file.value("decoder", Json()));
  std::unordered_map<uint32_t, std::string> texts;
  for (const auto& [name, id] : vocab->items()) {
    if (!id.is_number_unsigned()) return bad;
    texts[id.get<uint32_t>()] = BytesOfTokenName(name, is_byte_level);
  }
  const Json added = file.value("added_tokens", Json::array());
  for (const Json& token : added) {
    if (!token.is_object() || !token.contains("id") || !token["id"].is_number_unsigned()) continue;
    texts[token["id"].get<uint32_t>()] = token.value("content", "");
  }
  return TokenTexts(std::move(texts));
}

std::string TokenTexts::Of(uint32_t token_id) const {
  const auto found = texts_.find(token_id);
  return found == texts_.end() ? "" : found->second;
}

}  // namespace isobit
